"""A server that answers vLLM's requests at once, so that only what stands before it is measured.

    python -m benchmarks.null_server NUM_TOKENS

Prints its port. Every completion is the same; nothing is checked, and a request costs it
about 50 microseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys

_STREAM = b'"stream":true'


def build_reply(num_tokens: int, *, version: str, stream: bool) -> bytes:
    """The bytes of a completion, as vLLM's ``/inference/v1/generate`` sends it."""
    ids = list(range(10, 10 + num_tokens))
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
    }
    body = json.dumps({"request_id": "null", "choices": [choice]}, separators=(",", ":")).encode()
    kind = b"application/json"
    if stream:
        kind, body = b"text/event-stream", b"data: " + body + b"\n\ndata: [DONE]\n\n"
    return _format_response(b"200 OK", kind, body)


def _format_response(status: bytes, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


class NullServer(asyncio.Protocol):
    """One connection; requests come one after the other."""

    version = "default"
    replies: dict[bool, bytes]
    num_tokens = 0

    def __init__(self) -> None:
        self._data = b""
        self._transport: asyncio.Transport | None = None

    @classmethod
    def set_version(cls, version: str) -> None:
        """Completions carry it from now on."""
        cls.version = version
        cls.replies = {
            stream: build_reply(cls.num_tokens, version=version, stream=stream)
            for stream in (True, False)
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if len(rest) < length:
            return
        self._data = rest[length:]
        assert self._transport is not None
        self._transport.write(self._answer(head.split(b" ", 2)[1], rest[:length]))

    def _answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/inference/v1/generate":
            if body == b"{}":
                error = b'{"error":{"message":"token_ids: Field required"}}'
                return _format_response(b"400 Bad Request", b"application/json", error)
            return self.replies[_STREAM in body]
        if path == b"/update_weight_version":
            self.set_version(json.loads(body)["new_version"])
        answer = {"version": "0.32.0", "weight_version": self.version}
        return _format_response(b"200 OK", b"application/json", json.dumps(answer).encode())


async def serve(num_tokens: int) -> None:
    """Serves until the process is ended."""
    NullServer.num_tokens = num_tokens
    NullServer.set_version("default")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullServer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
