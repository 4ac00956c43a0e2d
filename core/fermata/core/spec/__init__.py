"""The two resources as types: what `fermata up`, the operator, the routers and the CRDs all read.

Fields are snake_case here and camelCase in manifests; this package is the one mapping place.
Unknown fields are errors.
"""

from __future__ import annotations

from fermata.core.spec.agent_deployment import (
    AgentDeployment,
    AgentDeploymentSpec,
    ClockSpec,
    Echo,
    FrontendSpec,
    Lorem,
    ModelSpec,
    Responder,
    RouterSpec,
    Script,
    SecuritySpec,
    SimulatedSpec,
    TimingSpec,
    TraceSpec,
    WorkerGroupSpec,
)
from fermata.core.spec.manifest import Manifests, load_manifests
from fermata.core.spec.resource import API_VERSION, Metadata
from fermata.core.spec.router_policy import (
    AffinitySpec,
    AimdSpec,
    KvAwareSpec,
    KvSpec,
    LeasesSpec,
    LivenessSpec,
    OverloadSpec,
    PolicyClassSpec,
    ProgramsSpec,
    QueueSpec,
    RouterPolicy,
    RouterPolicySpec,
    SchedulerSpec,
    ThunderAgentSpec,
    TierWeights,
)

__all__ = [
    "API_VERSION",
    "AffinitySpec",
    "AgentDeployment",
    "AgentDeploymentSpec",
    "AimdSpec",
    "ClockSpec",
    "Echo",
    "FrontendSpec",
    "KvAwareSpec",
    "KvSpec",
    "LeasesSpec",
    "LivenessSpec",
    "Lorem",
    "Manifests",
    "Metadata",
    "ModelSpec",
    "OverloadSpec",
    "PolicyClassSpec",
    "ProgramsSpec",
    "QueueSpec",
    "Responder",
    "RouterPolicy",
    "RouterPolicySpec",
    "RouterSpec",
    "SchedulerSpec",
    "Script",
    "SecuritySpec",
    "SimulatedSpec",
    "ThunderAgentSpec",
    "TierWeights",
    "TimingSpec",
    "TraceSpec",
    "WorkerGroupSpec",
    "load_manifests",
]
