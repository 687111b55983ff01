"""What agentrl says to SGLang, held against the classes of SGLang itself.

Its package pins another torch than ours, and cannot be imported beside it. But the definitions
that matter here need little, and are taken out of the real package's files and run.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from agentrl_cli.config.experiment import EngineConfig, ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.engine_server import LoraAdapter, check_server_version
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint
from agentrl_cli.engine.sglang.sglang_server import SAMPLING_MASK_TOP_K, SglangServer
from agentrl_cli.launch.plan import build_plan
from agentrl_cli.launch.servers.server_group import format_sglang_settings

ENDPOINT = ServerEndpoint(name="sglang-0", base_url="", api_key="key")
CLIENT = SglangServer(ENDPOINT, EngineConfig(kind="sglang", max_model_len=64))
_INSTALL = "uv pip install --no-deps --target {target} sglang==0.5.23"


@pytest.fixture(scope="module")
def package() -> Path:
    """The folder of the real package, installed apart so that nothing imports it by mistake."""
    folder = Path(sys.prefix) / "sglang-source"
    if not (folder / "sglang").is_dir():
        pytest.skip(f"needs the files of SGLang: {_INSTALL.format(target=folder)}")
    return folder / "sglang"


def load_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"sglang_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_definitions(path: Path, names: Iterable[str], **known: Any) -> types.ModuleType:
    """A module of the classes, functions and constants of a file that are named, and no others."""
    wanted = set(names)
    body: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        found = {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}
        if found & wanted:
            body.append(node)
            wanted -= found
    assert not wanted, f"{path} does not define {wanted}"
    future = ast.parse("from __future__ import annotations").body
    module = types.ModuleType(f"sglang_part_{path.stem}_{len(body)}")
    sys.modules[module.__name__] = module
    everything = {name: getattr(typing, name) for name in typing.__all__}
    vars(module).update({**everything, "dataclasses": dataclasses, "math": math, **known})
    exec(compile(ast.Module([*future, *body], []), str(path), "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def msgspec(package: Path) -> Any:
    return pytest.importorskip("msgspec")


@pytest.fixture(scope="module")
def api(package: Path, msgspec: Any) -> types.ModuleType:
    """SGLang's own decoder, through which each body of ``/generate`` goes."""
    return load_file(package / "api/v1/api_types.py")


@pytest.fixture(scope="module")
def admin_requests(package: Path, msgspec: Any) -> types.ModuleType:
    utils = load_file(package / "srt/utils/msgspec_utils.py")
    return load_definitions(
        package / "srt/managers/io_struct.py",
        [
            "BaseReq",
            "PauseGenerationReqInput",
            "ContinueGenerationReqInput",
            "UpdateWeightFromDiskReqInput",
            "UpdateWeightVersionReqInput",
            "LoadLoRAAdapterReqInput",
            "UnloadLoRAAdapterReqInput",
        ],
        msgspec=msgspec,
        msgspec_struct_pydantic_core_schema=utils.msgspec_struct_pydantic_core_schema,
    )


@pytest.fixture(scope="module")
def sampling_params(package: Path, msgspec: Any) -> types.ModuleType:
    return load_definitions(
        package / "srt/sampling/sampling_params.py",
        [
            "_SAMPLING_EPS",
            "TOP_K_ALL",
            "REQUEST_REASONING_END_TOKEN_IDS_KEY",
            "MAX_REQUEST_REASONING_END_TOKEN_IDS",
            "get_request_reasoning_end_token_ids",
            "SamplingParams",
        ],
        msgspec=msgspec,
        normalize_watermark_request=lambda request: request,
    )


def find_fields(path: Path, class_name: str) -> dict[str, ast.expr | None]:
    """Names of a class's fields, with the expressions of their defaults."""
    [found] = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    return {
        node.target.id: node.value
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


SAMPLINGS = {
    "plain": Sampling(max_tokens=5),
    "unlimited": Sampling(),
    "warm": Sampling(max_tokens=5, temperature=0.7, stop=("\n", "Q:"), stop_token_ids=(3, 4)),
    "nucleus": Sampling(max_tokens=5, top_p=0.9, seed=17),
    "greedy": Sampling(max_tokens=5, temperature=0.0, top_p=0.5),
    "nearly greedy": Sampling(max_tokens=5, temperature=9e-7),
    "constrained": Sampling(max_tokens=5, structural_tag='{"type": "structural_tag"}'),
    "likeliest": Sampling(max_tokens=5, num_top_logprobs=3),
    "likeliest of a nucleus": Sampling(max_tokens=5, top_p=0.9, num_top_logprobs=3),
    "likeliest of the greedy": Sampling(max_tokens=5, temperature=0.0, num_top_logprobs=3),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("stream_interval", [1, 64])
def test_sglang_understands_every_word_of_a_call(
    name: str, stream_interval: int, api: Any, sampling_params: Any, package: Path
) -> None:
    sampling = SAMPLINGS[name]
    body = CLIENT._format_generate(
        [5, 6, 7],
        sampling,
        max_tokens=sampling.max_tokens or 61,
        adapter=LoraAdapter("agentrl-3-0", 3),
        stream_interval=stream_interval,
    )
    # Its decoder passes over keys of the call that it does not know.
    assert set(body) <= set(api.GenerateRequest.__struct_fields__)
    assert set(body) <= set(find_fields(package / "srt/managers/io_struct.py", "GenerateReqInput"))
    decoded = api.GenerateRequest.from_json_value(json.loads(json.dumps(body)))
    assert decoded.stream is (stream_interval == 1)
    params = sampling_params.SamplingParams(**body["sampling_params"])
    params.verify(vocab_size=100)
    assert params.max_new_tokens == (61 if name == "unlimited" else 5)
    assert params.sampling_seed == sampling.seed
    assert params.stop_token_ids == (set(sampling.stop_token_ids) or None)
    assert params.stop_strs == (list(sampling.stop) or None)
    # SGLang's word for greedy is one candidate.
    assert (params.top_k == 1) == name.endswith("greedy")
    assert params.structural_tag == sampling.structural_tag
    if name.startswith("likeliest"):
        has_nucleus = name.endswith("nucleus")
        # SGLang gives no likeliest tokens without logprobs.
        assert (decoded.top_logprobs_num, decoded.return_logprob) == (3, True)
        assert bool(decoded.return_sampling_mask) is has_nucleus


def test_sglang_refuses_a_word_that_it_does_not_know(api: Any) -> None:
    """Else the test above could not fail."""
    with pytest.raises(api.JsonContractError, match="max_tokens"):
        api.GenerateRequest.from_json_value(
            {"input_ids": [1], "sampling_params": {"max_tokens": 3}}
        )


def test_the_cut_of_a_nucleus_is_within_the_servers_limit(package: Path) -> None:
    fields = find_fields(package / "srt/arg_groups/fields/exec_.py", "ExecFeatures")
    default = fields["sampling_mask_max_tokens"]
    assert isinstance(default, ast.Constant)
    # The scheduler asks for 1 < top_k <= limit, the help text for some room.
    assert 1 < SAMPLING_MASK_TOP_K < default.value


ORDERS = {
    "/pause_generation": ("PauseGenerationReqInput", {"mode": "retract"}),
    "/continue_generation": ("ContinueGenerationReqInput", {}),
    "/update_weights_from_disk": (
        "UpdateWeightFromDiskReqInput",
        {"model_path": "/dev/shm/w", "abort_all_requests": False, "flush_cache": True},
    ),
    "/update_weight_version": (
        "UpdateWeightVersionReqInput",
        {"new_version": "7", "abort_all_requests": False},
    ),
    "/load_lora_adapter": ("LoadLoRAAdapterReqInput", {"lora_path": "/dev/shm/a"}),
    "/unload_lora_adapter": ("UnloadLoRAAdapterReqInput", {"lora_name": "agentrl-adapter-0"}),
}


@pytest.mark.parametrize("kind", ["sglang"])
async def test_sglang_understands_every_order(
    admin_requests: Any, server: SglangServer, faulty: Any
) -> None:
    faulty.models.append("agentrl-adapter-0")
    await server.pause()
    await server.load_weights(Path("/dev/shm/w"))
    await server.set_policy_version(7)
    await server.resume()
    await server.load_adapter(Path("/dev/shm/a"), 8)
    sent = dict(faulty.asked)
    assert sent.keys() == {*ORDERS, "/v1/models"}
    for path, (class_name, expected) in ORDERS.items():
        request_class = getattr(admin_requests, class_name)
        request = pydantic.TypeAdapter(request_class).validate_json(json.dumps(sent[path]))
        assert set(sent[path]) <= set(request_class.__struct_fields__)
        assert {key: getattr(request, key) for key in expected} == expected


def test_calls_would_be_aborted_by_sglangs_own_defaults(admin_requests: Any) -> None:
    """Why the bodies say so much: pausing and naming a version end all calls unless told not to."""
    pause = pydantic.TypeAdapter(admin_requests.PauseGenerationReqInput).validate_json("{}")
    assert pause.mode == "abort"
    version = pydantic.TypeAdapter(admin_requests.UpdateWeightVersionReqInput)
    assert version.validate_json('{"new_version": "1"}').abort_all_requests is True


def _reply(api: Any, output_ids: list[int], logprobs: list[float], **meta: Any) -> Any:
    """A reply in the form that SGLang's own encoder gives it."""
    entries = [
        api.LogprobEntry(logprob=logprob, token_id=token_id)
        for token_id, logprob in zip(output_ids, logprobs, strict=True)
    ]
    info = api.GenerateMetaInfo.from_json_value(
        {
            "id": "r",
            "prompt_tokens": 3,
            "output_token_logprobs": [entry.to_json_value() for entry in entries],
            **meta,
        }
    )
    reply = api.GenerateResponse(text="", meta_info=info, output_ids=output_ids)
    return json.loads(json.dumps(reply.to_json_value()))


def read(reply: Any, num_before: int = 0, **sampling: Any) -> Generation:
    return CLIENT._read_event(json.dumps(reply).encode(), Sampling(**sampling), num_before, None)


def test_the_pieces_of_a_stream_are_read(api: Any, package: Path, msgspec: Any) -> None:
    streaming = load_definitions(
        package / "srt/managers/tokenizer_manager.py",
        ["_INCREMENTAL_STREAMING_META_INFO_KEYS", "_slice_streaming_output_meta_info"],
    )
    versions = load_definitions(
        package / "srt/utils/weight_versions.py",
        [
            "WeightVersionSpan",
            "WeightVersionEvent",
            "compute_weight_version_spans",
            "add_weight_versions_to_meta_info",
        ],
        msgspec=msgspec,
    )
    ids, logprobs = [11, 12, 13, 14, 15], [-0.5, -1.0, -1.5, -2.0, -2.5]
    change = versions.WeightVersionEvent(old_version="7", num_output_tokens=2)
    pieces = []
    before = 0
    for end in (1, 3, 5):
        meta: dict[str, Any] = {"completion_tokens": end}
        if end == 5:
            meta["finish_reason"] = {"type": "length", "length": 5}
        reply = _reply(api, ids[:end], logprobs[:end], **meta)
        if end == 5:
            spans = versions.compute_weight_version_spans([change], "8", 5)
            versions.add_weight_versions_to_meta_info(reply["meta_info"], spans, 5)
        streaming._slice_streaming_output_meta_info(reply["meta_info"], before)
        reply["output_ids"] = reply["output_ids"][before:]
        pieces.append(read(reply, before))
        before = end
    assert [piece.completion_ids for piece in pieces] == [(11,), (12, 13), (14, 15)]
    assert [piece.rollout_logprobs for piece in pieces] == [(-0.5,), (-1.0, -1.5), (-2.0, -2.5)]
    assert [piece.finish_reason for piece in pieces] == [None, None, "length"]
    assert [piece.versions for piece in pieces] == [(), (), (7, 7, 8, 8, 8)]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_likeliest_tokens_are_read_best_first(top_p: float, api: Any, package: Path) -> None:
    streaming = load_definitions(
        package / "srt/managers/tokenizer_manager.py",
        ["_INCREMENTAL_STREAMING_META_INFO_KEYS", "_slice_streaming_output_meta_info"],
    )
    # What a nucleus leaves of the first has half of the mass, of the second all of it.
    ids, raised = [11, 12], [math.log(2), 0.0]
    plain = [[(-0.75, 10), (-1.5, 11), (-3.0, 9)], [(-0.25, 12), (-2.0, 8), (-4.0, 7)]]
    masks = [[11, 10], [12]]
    has_nucleus = top_p < 1
    pieces = []
    for end in (1, 2):
        meta: dict[str, Any] = {
            "completion_tokens": end,
            "finish_reason": {"type": "length", "length": 2} if end == 2 else None,
            "weight_versions": [{"version": "1", "start": 0, "end": 2}],
            "output_top_logprobs": [[[*pair, None] for pair in top] for top in plain[:end]],
        }
        reply = _reply(api, ids[:end], [-1.5, -0.25][:end], **meta)
        if has_nucleus:
            reply["meta_info"]["output_token_sampling_mask"] = masks[:end]
            reply["meta_info"]["output_token_sampling_logprobs"] = [-1.5 + raised[0], -0.25][:end]
        streaming._slice_streaming_output_meta_info(reply["meta_info"], end - 1)
        reply["output_ids"] = reply["output_ids"][end - 1 :]
        pieces.append(read(reply, end - 1, top_p=top_p, num_top_logprobs=2))
    if has_nucleus:
        first = ((10, -0.75 + raised[0]), (11, -1.5 + raised[0]))
        assert [piece.top_logprobs for piece in pieces] == [(first,), (((12, -0.25),),)]
    else:
        first = ((10, -0.75), (11, -1.5))
        assert [piece.top_logprobs for piece in pieces] == [(first,), (((12, -0.25), (8, -2.0)),)]
    assert [piece.rollout_logprobs for piece in pieces] == [(first[1][1],), (-0.25,)]


def test_the_end_is_read_from_sglangs_own_reasons(api: Any, package: Path) -> None:
    reasons = load_definitions(
        package / "srt/managers/schedule_batch.py",
        ["BaseFinishReason", "FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISH_LENGTH"],
    )
    spans = [{"version": "1", "start": 0, "end": 2}]

    for reason, expected in (
        (reasons.FINISH_MATCHED_TOKEN(matched=12), ("stop", None)),
        (reasons.FINISH_MATCHED_STR(matched="\n\n"), ("stop", "\n\n")),
        (reasons.FINISH_LENGTH(length=2), ("length", None)),
    ):
        meta = {"completion_tokens": 2, "finish_reason": reason.to_json()}
        generation = read(_reply(api, [11, 12], [-1.0, -1.0], weight_versions=spans, **meta))
        assert (generation.finish_reason, generation.stop_text) == expected


def _find_routes(package: Path) -> dict[tuple[str, str], bool]:
    """(method, path) of each endpoint -> whether it is one of the administrator's."""
    routes = {}
    tree = ast.parse((package / "srt/entrypoints/http_server.py").read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        calls = [call for call in node.decorator_list if isinstance(call, ast.Call)]
        names = [ast.unparse(call.func) for call in calls]
        for call, name in zip(calls, names, strict=True):
            if not name.startswith("app.") or not isinstance(call.args[0], ast.Constant):
                continue
            methods = [name.removeprefix("app.").upper()]
            if name == "app.api_route":
                [keyword] = [word for word in call.keywords if word.arg == "methods"]
                methods = ast.literal_eval(keyword.value)
            for method in methods:
                routes[method, call.args[0].value] = "auth_level" in names
    return routes


def test_every_endpoint_exists_and_needs_the_key(package: Path) -> None:
    auth = load_file(package / "srt/utils/auth.py")
    decide: Callable[..., Any] = auth.decide_request_auth
    routes = _find_routes(package)
    asked = ("/model_info", "/v1/models", "/health_generate", "/health")
    used = [("GET", path) for path in asked] + [("POST", path) for path in ("/generate", *ORDERS)]
    for method, path in used:
        level = auth.AuthLevel.ADMIN_OPTIONAL if routes[method, path] else auth.AuthLevel.NORMAL

        def is_allowed(header: str | None, method: str, path: str, level: Any) -> bool:
            return decide(
                method=method,
                path=path,
                authorization_header=header,
                api_key="key",
                admin_api_key=None,
                auth_level=level,
            ).allowed

        assert is_allowed("Bearer key", method, path, level)
        assert is_allowed(None, method, path, level) == path.startswith("/health"), path


def test_every_option_of_the_command_exists(package: Path) -> None:
    fields, aliases = set(), set()
    for file in (package / "srt/arg_groups/fields").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields.add(node.target.id)
            if isinstance(node, ast.keyword) and node.arg == "aliases":
                aliases.update(ast.literal_eval(node.value))
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "m", "lora": {"rank": 8}},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
            "engine": {"kind": "sglang", "server_args": ["--random-seed", "1"]},
        }
    )
    run = resolve_run(config, Machine(gpu_ids=("0", "1")), purpose="train")
    server = build_plan(config, run)[1]
    argv, env = server.argv, server.env
    options = [word for word in argv if word.startswith("--")]
    unknown = [
        option
        for option in options
        if option not in aliases and option[2:].replace("-", "_") not in fields | {"config"}
    ]
    assert unknown == []
    known_env = (package / "srt/environ.py").read_text() + (
        package / "srt/layers/sampler.py"
    ).read_text()
    assert [n for n in env if n.startswith("SGLANG_") and n not in known_env] == []


def test_the_key_is_read_from_a_file(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    key = "0123:#'\"x"
    path.write_text(format_sglang_settings(key))
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    parser.add_argument("--config")
    merger = load_file(package / "srt/utils/server_args_config_parser.py").ConfigArgumentMerger
    merged = merger(parser).merge_config_with_args(["--config", str(path)])
    assert parser.parse_args(merged).api_key == key


def test_the_version_whose_files_were_read_is_supported(package: Path) -> None:
    [metadata] = package.parent.glob("sglang-*.dist-info")
    check_server_version("sglang", metadata.name.removeprefix("sglang-").removesuffix(".dist-info"))
