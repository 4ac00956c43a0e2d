"""Everything one frontend process is told, built once by `cli` and printed at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from fermata.core.ids import OwnerId
from fermata.core.ring import Ring
from fermata.core.spec import AgentDeployment, FrontendSpec, ModelSpec
from fermata.frontend.turn_model import TurnLimits


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """In real seconds and bytes: they are about clients."""

    keep_alive_s: float = 15.0
    """Longest silence on a response that has begun, and before the first byte of a stream."""
    patience_s: float = 20.0
    """A response that is not streamed begins after so long, with white space."""
    body_bytes: int = 32 << 20
    head_wait_s: float = 30.0
    """Longest wait for the rest of a request's head, and for a new connection's first request."""
    body_wait_s: float = 30.0
    """Longest wait for more of a request's body."""
    thread_chars: int = 32_768
    """Prompts with more new text than this are tokenised in a thread, so that other streams go on."""
    thread_parts: int = 1024
    """Likewise those with more messages, parts and tools to render: a template takes 15 us for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    id: OwnerId
    deployment: AgentDeployment
    ring: Ring
    host: str = "127.0.0.1"
    port: int = 8000
    reuse_port: bool = False
    infer_sessions: bool = True
    http: HttpLimits = field(default_factory=HttpLimits)
    turn: TurnLimits = field(default_factory=TurnLimits)
    """In real seconds; the service turns them into the deployment's."""

    @property
    def model(self) -> ModelSpec:
        return self.deployment.spec.model

    @property
    def frontend(self) -> FrontendSpec:
        return self.deployment.spec.frontend

    @property
    def block_size(self) -> int:
        return self.deployment.spec.routing_block_size

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model.name, *self.model.aliases)
