"""The models of a run: the learner's, the reference, and the engine's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import ModelError
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.builtin_models import find_model_folder, resolve_model_folder
from agentrl_cli.store.checksums import check_checksums
from agentrl_cli.store.run_folder import RunFolder

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from agentrl_cli.train.learner import Learner
    from agentrl_cli.train.ranks import Ranks


def load_learner(
    config: ExperimentConfig,
    run: ResolvedRun,
    model_folder: str,
    tokenizer: object,
    *,
    ranks: Ranks,
    folder: RunFolder | None = None,
) -> Learner:
    """A learner on the model's exact weights, with the reference model that a KL term needs and
    the critic's that its advantages need; as it was at the last checkpoint in the ``folder``.

    Several ranks load one after the other, so that one whole model stands in memory.

    Raises:
        ModelError: the model cannot be loaded or followed.
        MissingExtraError: an adapter is to be trained and peft is not installed.
    """
    from agentrl_cli.models.pretrained import load_model
    from agentrl_cli.train.learner import Learner

    device = _open_device(run)
    # An adapter's reference is the model without it.
    needs_reference = config.train.algorithm.uses_reference and config.model.lora is None
    sends_adapter = bool(run.servers) and run.weight_transfer == "lora"

    fingerprint = ""

    def load() -> Learner:
        nonlocal fingerprint
        model = load_model(model_folder, "float32", device)
        fingerprint = _compute_fingerprint(model)
        return Learner(
            model,
            config,
            reference_model=(
                load_model(model_folder, "float32", device) if needs_reference else None
            ),
            critic_model=_load_critic_model(config, model_folder, tokenizer, device),
            tokenizer=tokenizer,
            device=device,
            published="adapter" if sends_adapter else "whole",
            ranks=ranks,
        )

    learner = ranks.in_turn(load)
    _check_equal(fingerprint, ranks, config.model.path)
    if folder is not None:
        latest = folder.latest_checkpoint() if ranks.index == 0 else None
        step = ranks.broadcast(latest and latest[0])
        if step is not None:
            # Each rank's own copy, where the folder is on another machine.
            checkpoint = folder.fetch_checkpoint(step)
            check_checksums(checkpoint)
            learner.load(str(checkpoint))
    return learner


def _check_equal(fingerprint: str, ranks: Ranks, path: str) -> None:
    """Refuses ranks whose models differ, since each holds shards of what it has loaded itself.

    Raises:
        ModelError: naming them.
    """
    first, *others = ranks.gather_objects(fingerprint)
    strange = [rank for rank, found in enumerate(others, start=1) if found != first]
    if strange:
        raise ModelError(
            f"model.path: what {path} is on the nodes differs: the weights of ranks {strange} are "
            "not those of rank 0. Name a folder that all nodes share, or a hub id whose revision "
            "is the same in the cache of each"
        )


def _compute_fingerprint(model: PreTrainedModel) -> str:
    """Of the first values of every parameter."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().flatten()[:64].cpu().numpy().tobytes())
    return digest.hexdigest()


def find_unseen_models(config: ExperimentConfig) -> dict[str, str]:
    """The models that would have to be fetched or made first, by their key.

    Raises:
        ModelError: a folder that does not exist, or a critic's that holds no model.
    """
    from agentrl_cli.models.model_files import check_model_files

    paths = {"model.path": config.model.path, "tokenizer_path": config.tokenizer_path}
    if config.train.critic is not None:
        paths["train.critic.path"] = config.train.critic.path
    unseen = {}
    for key, path in paths.items():
        if path is None:
            continue
        with _named_by(key):
            folder = find_model_folder(path)
            if folder is None:
                unseen[key] = path
            elif key == "train.critic.path":
                # The policy's is looked at together with its tokenizer.
                check_model_files(folder)
    return unseen


@contextmanager
def _named_by(key: str) -> Iterator[None]:
    """Errors inside the block blame this key, and not ``model.path``."""
    try:
        yield
    except ModelError as error:
        text = str(error).removeprefix("model.path: ").replace("model.path=", f"{key}=")
        raise ModelError(f"{key}: {text}") from error


def _load_critic_model(
    config: ExperimentConfig, model_folder: str, tokenizer: Any, device: torch.device
) -> PreTrainedModel | None:
    """What the critic starts from: the policy's start weights, or ``train.critic.path``'s."""
    from agentrl_cli.models.pretrained import load_model

    critic = config.train.critic
    if critic is None or critic.path is None:
        return None if critic is None else load_model(model_folder, "float32", device)
    with _named_by("train.critic.path"):
        folder = resolve_model_folder(critic.path, SilentObserver())
        model = load_model(folder, "float32", device, needs_head=False)
    num_known = model.get_input_embeddings().weight.shape[0]
    if num_known < len(tokenizer):
        raise ModelError(
            f"train.critic.path: {critic.path} knows {num_known} tokens, and the policy's "
            f"tokenizer has {len(tokenizer)}. Allowed: models with the policy's tokenizer. "
            "Type train.critic.path=null to start from the policy's own weights"
        )
    return model


def _open_device(run: ResolvedRun) -> torch.device:
    import torch

    if run.num_gpus and not torch.cuda.is_available():
        raise ModelError(
            f"this machine shows {run.num_gpus} GPU(s), and the installed torch "
            f"({torch.__version__}) cannot use them. Install torch for CUDA (pip install "
            "'agentrl-cli[vllm]' brings it), or hide the GPUs: type CUDA_VISIBLE_DEVICES= before "
            "the command"
        )
    return torch.device(run.trainer_device)


def find_tied_names(model: Any) -> dict[str, str]:
    """Further names of the model's parameters, and the first name of each.

    A tied output head is ``{"lm_head.weight": "model.embed_tokens.weight"}``.
    """
    first_names: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


def load_embedded_engine(
    config: ExperimentConfig, run: ResolvedRun, model_folder: str, tokenizer: Any
) -> InferenceEngine:
    """The engine that samples in this process, on a copy of the model of its own.

    Raises:
        ModelError: the model cannot be loaded.
    """
    from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
    from agentrl_cli.models.pretrained import load_model

    return EmbeddedEngine(
        load_model(model_folder, config.model.dtype, _open_device(run)),
        tokenizer,
        config.engine,
        model_name=config.model.path,
    )
