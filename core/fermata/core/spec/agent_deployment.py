"""AgentDeployment: what runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from fermata.core.spec.resource import (
    Fraction,
    Metadata,
    Name,
    NonNegativeInt,
    PositiveInt,
    SecondsOrZero,
    Spec,
)


class ModelSpec(Spec, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    aliases: list[str] = []
    path: str = ""
    """Folder with tokenizer.json, tokenizer_config.json and the chat template. Empty: the small
    model that ships with Fermata (simulated engines only). A relative path is relative to the
    manifest."""
    context_length: PositiveInt = 131_072
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    chat_template: str = ""
    """Path of a Jinja file that replaces the folder's own."""


class TraceSpec(Spec, frozen=True):
    enabled: bool = False
    path: str = ".fermata/trace/fermata"
    """Prefix of the segments `PREFIX.NNNNNN.jsonl.gz`."""
    roll_bytes: PositiveInt = 268_435_456
    """Uncompressed bytes after which a segment is closed."""


class FrontendSpec(Spec, frozen=True):
    replicas: PositiveInt = 1
    """On one machine replica i listens on port + i."""
    processes: PositiveInt = 1
    """Server processes of a replica, sharing its port."""
    trace: TraceSpec = TraceSpec()
    api_keys: dict[str, str] = {}
    """API key -> tenant. Empty: every key is accepted and shares one namespace."""
    session_cache_bytes: PositiveInt = 268_435_456


class RouterSpec(Spec, frozen=True):
    replicas: PositiveInt = 1


class ClockSpec(Spec, frozen=True):
    speedup: Annotated[float, Meta(gt=0.0, le=10_000.0)] = 1.0
    """Deployment seconds a wall second; other than 1 only with simulated engines."""


class Echo(Spec, frozen=True, tag="Echo", tag_field="type"):
    """Says the last user or tool message back."""


class Lorem(Spec, frozen=True, tag="Lorem", tag_field="type"):
    """Words seeded by the prompt."""

    tokens: PositiveInt = 128
    """Length where the request names no max_tokens."""


class Script(Spec, frozen=True, tag="Script", tag_field="type"):
    """Speaks by rules from a YAML file: `rules: [{when: REGEX, say: TEXT, delayS: 0, times:
    N}]`."""

    path: Annotated[str, Meta(min_length=1)]


Responder = Echo | Lorem | Script


class TimingSpec(Spec, frozen=True):
    """Milliseconds of an engine step.

    prefill = a T^2 + b T + c for T new prompt tokens in the step (0 for none); decode = max(1, d
    p^2 + e p + f) with p the share of KV in use (0 when nothing decodes). Defaults: Dynamo's
    mocker 1.6.1.
    """

    prefill_quadratic: float = 4.21e-7
    prefill_linear: float = 0.01518
    prefill_constant: float = 16.5
    decode_quadratic: float = -25.74
    decode_linear: float = 54.01
    decode_constant: float = 5.74


class SimulatedSpec(Spec, frozen=True):
    kv_blocks: PositiveInt = 16_384
    """Pages of `blockSize` tokens, a rank."""
    max_sequences: PositiveInt = 256
    max_batched_tokens: PositiveInt = 8192
    prefix_caching: bool = True
    kv_events: bool = True
    watermark: Fraction = 0.01
    """Share of pages kept free when a new request is admitted."""
    timing: TimingSpec = TimingSpec()
    responder: Responder = Echo()
    startup_s: SecondsOrZero = 0.0


class WorkerGroupSpec(Spec, frozen=True):
    name: Name
    role: Literal["Aggregated", "Prefill", "Decode"] = "Aggregated"
    engine: Literal["VLLM", "SGLang", "Simulated"] = "Simulated"
    replicas: NonNegativeInt | None = 1
    """Absent (null): an autoscaler owns the count."""
    gpus: NonNegativeInt = 0
    tensor_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    block_size: PositiveInt = 64
    """Engine page in tokens; divides routingBlockSize."""
    engine_args: dict[str, Any] = {}
    simulated: SimulatedSpec = SimulatedSpec()


class SecuritySpec(Spec, frozen=True):
    curve: bool = False
    """CURVE encryption and authentication between all parts."""


class AgentDeploymentSpec(Spec, frozen=True):
    model: ModelSpec
    workers: Annotated[list[WorkerGroupSpec], Meta(min_length=1)]
    router_policy_ref: Name | None = None
    """Absent: a RouterPolicy of defaults."""
    routing_block_size: PositiveInt = 64
    frontend: FrontendSpec = FrontendSpec()
    router: RouterSpec = RouterSpec()
    clock: ClockSpec = ClockSpec()
    security: SecuritySpec = SecuritySpec()

    def problems(self) -> list[tuple[str, str, str]]:
        """Cross-field rules: (field, what is wrong, the fix)."""
        found: list[tuple[str, str, str]] = []
        names: set[str] = set()
        for i, group in enumerate(self.workers):
            at = f"workers[{i}]"
            if group.name in names:
                found.append(
                    (f"{at}.name", f"{group.name!r} is used twice", "give each group its own name")
                )
            names.add(group.name)
            if group.name in {"router", "frontend"}:
                found.append(
                    (f"{at}.name", f"{group.name!r} is the name of a component", "use another name")
                )
            if self.routing_block_size % group.block_size:
                found.append((
                    f"{at}.blockSize",
                    f"{group.block_size} does not divide "
                    f"routingBlockSize {self.routing_block_size}",
                    "use a divisor of routingBlockSize",
                ))  # fmt: skip
            if group.engine != "Simulated" and self.clock.speedup != 1.0:
                found.append(
                    ("clock.speedup", f"group {group.name!r} is a real engine", "set it to 1")
                )
            if group.engine != "Simulated" and not self.model.path:
                found.append(
                    (
                        "model.path",
                        f"group {group.name!r} is a real engine",
                        "name the model's folder",
                    )
                )
        return found


class AgentDeployment(Spec, frozen=True):
    api_version: Literal["fermata.dev/v1alpha1"]
    kind: Literal["AgentDeployment"]
    metadata: Metadata
    spec: AgentDeploymentSpec
