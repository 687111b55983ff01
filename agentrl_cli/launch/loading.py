"""The models of a run: the learner's, the reference, and the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.engine.weight_transfer import resolve_transfer_kind
from agentrl_cli.errors import ModelError
from agentrl_cli.launch.connecting import open_router
from agentrl_cli.launch.handover import RunningServers
from agentrl_cli.launch.plan import resolve_engine_kind
from agentrl_cli.log import Observer, SilentObserver
from agentrl_cli.models.loading import resolve_model_folder
from agentrl_cli.models.pretrained import choose_device, load_model
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.train.commands import LeadingLearner
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

#: What a router may take longer than the servers' start before nobody waits for it.
_GRACE_SECONDS = 30.0


def load_learner(
    config: ExperimentConfig,
    model_folder: str,
    tokenizer: object,
    *,
    num_gpus: int,
    ranks: Ranks = SINGLE,
) -> Learner:
    """A learner on the model's exact weights, with the reference model that a KL term needs and
    the critic's that its advantages need.

    Of several ranks the first gets a :class:`LeadingLearner`. They load one after the other, so
    that one whole model stands in memory.

    Raises:
        ModelError: the model cannot be loaded or followed.
        MissingExtraError: an adapter is to be trained and peft is not installed.
    """
    device = choose_device()
    # An adapter's reference is the model without it.
    needs_reference = config.train.algorithm.uses_reference and config.model.lora is None
    sends_adapter = (
        resolve_engine_kind(config, num_gpus) != "embedded"
        and resolve_transfer_kind(config, num_gpus=num_gpus) == "lora"
    )
    is_first = ranks.count > 1 and ranks.index == 0
    learner: Learner | None = None
    for turn in range(ranks.count):
        if turn == ranks.index:
            learner = (LeadingLearner if is_first else Learner)(
                load_model(model_folder, "float32", device),
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
        ranks.barrier()
    assert learner is not None
    return learner


def _load_critic_model(
    config: ExperimentConfig, model_folder: str, tokenizer: Any, device: torch.device
) -> PreTrainedModel | None:
    """What the critic starts from: the policy's start weights, or ``train.critic.path``'s."""
    critic = config.train.critic
    if critic is None or critic.path is None:
        return None if critic is None else load_model(model_folder, "float32", device)
    try:
        folder = resolve_model_folder(critic.path, SilentObserver())
        model = load_model(folder, "float32", device)
    except ModelError as error:
        text = str(error).removeprefix("model.path: ").replace("model.path=", "train.critic.path=")
        raise ModelError(f"train.critic.path: {text}") from error
    num_known = model.get_input_embeddings().weight.shape[0]
    if num_known < len(tokenizer):
        raise ModelError(
            f"train.critic.path: {critic.path} knows {num_known} tokens, and the policy's "
            f"tokenizer has {len(tokenizer)}. Allowed: models with the policy's tokenizer. "
            "Type train.critic.path=null to start from the policy's own weights"
        )
    return model


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


def load_engine(
    config: ExperimentConfig,
    model_folder: str,
    tokenizer: object,
    *,
    servers: RunningServers | None,
    background: BackgroundLoop,
    observer: Observer,
    version: int | None = None,
    tied_names: Mapping[str, str] | None = None,
) -> InferenceEngine:
    """An engine that is ready for calls.

    Args:
        config: the experiment's.
        model_folder: folder or hub id of the model.
        tokenizer: the model's.
        servers: they sample; None: this process does, on its own copy of the model.
        background: the loop on which the engine is used.
        observer: shows what goes wrong with weights on their way to servers.
        version: what the servers' weights are called; None: the first publication will say.
        tied_names: of :func:`find_tied_names`, for servers that will get weights.

    Raises:
        ModelError: the model cannot be loaded.
        EngineError: no server became ready in time.
    """
    if servers is None:
        from agentrl_cli.engine.embedded import EmbeddedEngine

        return EmbeddedEngine(
            load_model(model_folder, config.model.dtype, choose_device()),
            tokenizer,
            config.engine,
            model_name=config.model.path,
        )
    return background.run(
        open_router(config, model_folder, servers, version, tied_names or {}, observer.on_message),
        config.engine.start_timeout_seconds + _GRACE_SECONDS,
    )
