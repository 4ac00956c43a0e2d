"""The ASGI application: turns by a raw function, the rest by FastAPI. No middleware stands in a token's way."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from prometheus_client import CollectorRegistry

from fermata.frontend.config import FrontendConfig
from fermata.frontend.http.asgi import Receive, Scope, Send
from fermata.frontend.http.chat import ChatWriter
from fermata.frontend.http.collector import FrontendCollector
from fermata.frontend.http.completions import CompletionWriter
from fermata.frontend.http.exchange import KeepAlives
from fermata.frontend.http.slow import SlowRoom, slow_app
from fermata.frontend.http.turns import TurnEndpoint, TurnRoom
from fermata.frontend.intake import Intake
from fermata.frontend.keys import ApiKeys
from fermata.frontend.lineage import Lineages
from fermata.frontend.metrics import FrontendMetrics
from fermata.frontend.prompt import PromptModel
from fermata.frontend.request import ChatBody, CompletionBody
from fermata.frontend.service import FrontendService
from fermata.trace import TraceWriter

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class FrontendApp:
    """Make it inside the running loop; `run` keeps held clients alive until cancelled."""

    def __init__(
        self,
        config: FrontendConfig,
        *,
        service: FrontendService,
        model: PromptModel,
        trace: TraceWriter | None = None,
    ) -> None:
        window = config.model.context_length
        context_length = min(window, model.folder.context_length or window)
        self.metrics = FrontendMetrics()
        self.lineages = Lineages(name=f"{service.id}/{service.incarnation}")
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")
        self._keep_alives = KeepAlives(period_s=min(1.0, config.http.keep_alive_s / 4))
        keys = ApiKeys(config.frontend.api_keys)
        intake = Intake(
            config,
            model=model,
            lineages=self.lineages,
            context_length=context_length,
            threads=self._threads,
        )
        room = TurnRoom(service, model, keys, config.http, self.metrics, self._keep_alives, trace)
        self._turns: dict[str, AsgiApp] = {
            "/v1/chat/completions": TurnEndpoint(
                "chat", room, decoder=msgspec.json.Decoder(ChatBody), accept=intake.chat, writer=ChatWriter
            ),
            "/v1/completions": TurnEndpoint(
                "completions", room, decoder=msgspec.json.Decoder(CompletionBody), accept=intake.completion,
                writer=CompletionWriter,
            ),
        }  # fmt: skip
        registry = CollectorRegistry()
        registry.register(
            FrontendCollector(
                service=service, metrics=self.metrics, prompts=model.path, lineages=self.lineages, trace=trace
            )
        )  # fmt: skip
        self._slow: AsgiApp = slow_app(
            SlowRoom(
                config=config, service=service, model=model, keys=keys, registry=registry, threads=self._threads,
                context_length=context_length, created=int(time.time()),
            )
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        turns = self._turns.get(scope["path"]) if scope["type"] == "http" else None
        await (turns or self._slow)(scope, receive, send)

    async def run(self) -> None:
        try:
            await self._keep_alives.run()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
