"""The client's side: one module a dialect, a raw ASGI path for turns, FastAPI for the rest."""
