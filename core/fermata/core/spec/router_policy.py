"""RouterPolicy: how turns are scheduled. One immutable value, replaced whole by SetPolicy.

Defaults are the measured ones (Dynamo's ThunderAgent plug-in and its KV router) unless a field
says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fermata.core.spec.resource import (
    Fraction,
    Metadata,
    Name,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    SecondsOrZero,
    Spec,
    Weight,
)


class TierWeights(Spec, frozen=True):
    """Credit of a cached block by where it lies; 1.0 is as good as on the device."""

    device: Fraction = 1.0
    host: Fraction = 0.75
    disk: Fraction = 0.25
    shared: Fraction = 0.5


class KvAwareSpec(Spec, frozen=True):
    """Cost of a slot: prefillScale * max(0, (pending + input) / block - credit) + decode blocks +
    weight * active."""

    prefill_scale: Weight = 1.0
    decode_request_weight: Weight = 0.0
    tier_weights: TierWeights = TierWeights()
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """0 takes the cheapest slot; above, a softmax over normalised costs."""
    balance: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """Bounded load: no slot above (1 + balance) x the mean of the eligible ones. Absent: off."""


class AimdSpec(Spec, frozen=True):
    """A window of active programs a slot, for engines that tell no capacity (CONCUR, arXiv 2601.22705)."""

    initial: Annotated[float, Meta(ge=1.0)] = 8.0
    increase: Annotated[float, Meta(gt=0.0)] = 2.0
    """Programs more, after `turns` turns with at least `high` of the expected prefix in cache."""
    decrease: Fraction = 0.75
    """Factor after `turns` turns with less than `low`."""
    low: Fraction = 0.5
    high: Fraction = 0.8
    turns: PositiveInt = 8


class ThunderAgentSpec(Spec, frozen=True):
    """Program scheduling (arXiv 2602.13692; Dynamo's parameters)."""

    admission: Literal["Watermark", "Aimd"] = "Watermark"
    pause_threshold: Fraction = 0.95
    pause_target: Fraction = 0.80
    resume_hysteresis: Fraction = 0.10
    resume_timeout_s: Seconds = 1800.0
    tick_s: Seconds = 5.0
    buffer_tokens: NonNegativeInt = 100
    pause_order: Literal[
        "SmallestFirst", "IdlestFirst", "TokensPerIdleSecond", "DeclaredPriority"
    ] = "SmallestFirst"
    tool_gap_weight: Fraction = 1.0
    """What a token of a program that waits for a tool counts for."""
    human_gap_weight: Fraction = 0.5
    """The same of one that waits for a person: it comes back later, if at all."""
    new_programs: Literal["BehindPaused", "WhereRoom"] = "BehindPaused"
    """A new program waits while a paused one with a waiting turn exists, or only where there is no room for it."""
    aimd: AimdSpec = AimdSpec()


class SchedulerSpec(Spec, frozen=True):
    type: Literal["RoundRobin", "LeastLoaded", "KVAware", "ThunderAgent"] = "KVAware"
    kv_aware: KvAwareSpec = KvAwareSpec()
    thunder_agent: ThunderAgentSpec = ThunderAgentSpec()


class AffinitySpec(Spec, frozen=True):
    """Bind a session to the slot of its first successful dispatch."""

    mode: Literal["None", "Soft", "Hard"] = "Soft"
    ttl_s: Seconds = 1800.0
    """From the end of the session's last turn."""


Order = Literal["FCFS", "LCFS", "WSPT"]
Threshold = Annotated[float, Meta(gt=0.0, le=1e6)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class PolicyClassSpec(Spec, frozen=True):
    """Turns that share one part of the queue. What is absent is the queue's own."""

    name: Name
    family: Name | None = None
    """What the header x-dynamo-meta-policy-class names; classes of one family share its turns by
    uncached length. Absent: the name."""
    min_uncached_tokens: NonNegativeInt = 0
    """Within its family, for turns with at least so many."""
    quantum: PositiveInt = 2048
    """Uncached tokens a round of deficit round robin."""
    order: Order | None = None
    threshold: Threshold | None = None
    threshold_tokens: PositiveInt | None = None
    busy_share: Share | None = None
    limit: PositiveInt | None = None
    input_tokens_limit: PositiveInt | None = None
    cached_tokens_limit: PositiveInt | None = None
    priority_line: int | None = None


class QueueSpec(Spec, frozen=True):
    """Order: who has waited for fairWait, by age; then strict priority; then classes in turn; then
    the class's order."""

    order: Order = "FCFS"
    threshold: Threshold | None = None
    """Requests wait while every eligible slot has more pending prefill than this x max batched
    tokens. Absent: never."""
    threshold_tokens: PositiveInt | None = None
    """The same in tokens; either is enough."""
    busy_share: Share = 1.0
    """Of the eligible slots: that many above the threshold are enough to wait."""
    limit: PositiveInt = 1024
    """Waiting turns of a class, a worker; beyond, 529."""
    input_tokens_limit: PositiveInt | None = None
    """Input tokens of a class's waiting turns, a worker. Absent: any."""
    cached_tokens_limit: PositiveInt | None = None
    """As many of them as are cached somewhere."""
    priority_line: int | None = None
    """Turns of a higher priority are never refused. Absent: priority does not help there."""
    fair_wait_s: Seconds = 60.0
    """Whoever has waited so long goes first, whatever class and strict priority. Long: strict
    priorities hold for as long."""
    default_class: Name | None = None
    """Family of turns that name none, or none that exists. Absent: the first class's."""
    classes: Annotated[list[PolicyClassSpec], Meta(max_length=64)] = []
    """None: one for all."""

    def problems(self) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = []
        names: set[str] = set()
        starts: dict[str, set[int]] = {}
        for number, each in enumerate(self.classes):
            at = f"queue.classes[{number}]"
            if each.name in names:
                found.append((f"{at}.name", f"{each.name} is there twice", "name each class once"))
            names.add(each.name)
            family = starts.setdefault(each.family or each.name, set())
            if each.min_uncached_tokens in family:
                found.append((
                    f"{at}.minUncachedTokens",
                    f"family {each.family or each.name} has another class from there on",
                    "let each class of a family begin elsewhere",
                ))  # fmt: skip
            family.add(each.min_uncached_tokens)
        found += [
            (
                "queue.classes",
                f"family {family} has no class for turns with fewer than {min(of)} uncached tokens",
                "let one class of it have minUncachedTokens 0",
            )
            for family, of in starts.items()
            if 0 not in of
        ]
        if self.default_class is not None and self.default_class not in starts:
            found.append((
                "queue.defaultClass",
                f"no class is of family {self.default_class}",
                "name one that exists",
            ))  # fmt: skip
        return found


class OverloadSpec(Spec, frozen=True):
    no_worker_wait_s: SecondsOrZero = 60.0
    decode_blocks: Fraction | None = None
    """A slot is busy above this share of its KV blocks in use. Absent: never."""
    prefill_tokens: Annotated[float, Meta(gt=0.0)] | None = None
    """A slot is busy above this x max batched tokens of pending prefill. Absent: never."""
    prefill_token_count: PositiveInt | None = None
    """The same in tokens; either is enough."""
    retry_after_max_s: Seconds = 120.0
    """Longest time to come again that a refused turn is told."""


class LivenessSpec(Spec, frozen=True):
    """Limits on real machines, in real seconds whatever the deployment's speedup."""

    heartbeat_s: Seconds = 1.0
    worker_timeout_s: Seconds = 3.0
    owner_timeout_s: Seconds = 5.0
    stall_timeout_s: Seconds = 30.0
    snapshot_wait_s: Seconds = 5.0


class LeasesSpec(Spec, frozen=True):
    dispatch_timeout_s: Seconds = 5.0
    liveness: LivenessSpec = LivenessSpec()


class KvSpec(Spec, frozen=True):
    events: bool = True
    """False: an approximate index learned from own grants, as for a worker that sends none."""
    approximate: Literal["Ttl", "Lru"] = "Lru"
    """How such an index forgets: what was used longest ago, once a rank can not hold more, or also by age."""
    approximate_ttl_s: Seconds = 120.0
    hints: bool = True
    pinning: bool = False
    speculative_prefill: bool = False
    index_blocks: PositiveInt = 4_000_000
    """Bound of the prefix index, in (block, slot) pairs."""


class ProgramsSpec(Spec, frozen=True):
    inferred: bool = True
    """Anonymous turns that extend an earlier prompt continue its session."""
    idle_timeout_s: Seconds = 1800.0


class RouterPolicySpec(Spec, frozen=True):
    scheduler: SchedulerSpec = SchedulerSpec()
    session_affinity: AffinitySpec = AffinitySpec()
    queue: QueueSpec = QueueSpec()
    overload: OverloadSpec = OverloadSpec()
    leases: LeasesSpec = LeasesSpec()
    kv: KvSpec = KvSpec()
    programs: ProgramsSpec = ProgramsSpec()

    def problems(self) -> list[tuple[str, str, str]]:
        """Cross-field rules: (field, what is wrong, the fix)."""
        found = self.queue.problems()
        thunder = self.scheduler.thunder_agent
        if thunder.pause_target > thunder.pause_threshold:
            found.append((
                "scheduler.thunderAgent.pauseTarget",
                f"{thunder.pause_target} is above pauseThreshold {thunder.pause_threshold}",
                "lower it to pauseThreshold or below",
            ))  # fmt: skip
        if thunder.resume_hysteresis > thunder.pause_threshold:
            found.append((
                "scheduler.thunderAgent.resumeHysteresis",
                f"{thunder.resume_hysteresis} is above pauseThreshold {thunder.pause_threshold}",
                "lower it to pauseThreshold or below",
            ))  # fmt: skip
        if thunder.aimd.low > thunder.aimd.high:
            found.append((
                "scheduler.thunderAgent.aimd.low",
                f"{thunder.aimd.low} is above high {thunder.aimd.high}",
                "lower it to high or below",
            ))  # fmt: skip
        if self.scheduler.type == "ThunderAgent" and self.session_affinity.mode == "Hard":
            found.append((
                "sessionAffinity.mode",
                "Hard affinity leaves ThunderAgent nowhere to resume a program",
                "use Soft",
            ))  # fmt: skip
        return found


class RouterPolicy(Spec, frozen=True):
    api_version: Literal["fermata.dev/v1alpha1"]
    kind: Literal["RouterPolicy"]
    metadata: Metadata
    spec: RouterPolicySpec = RouterPolicySpec()
