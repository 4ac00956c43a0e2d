"""The stack of the end-to-end tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "fermata_e2e_stack", Path(__file__).parents[1] / "e2e" / "conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
stack_factory = _module.stack_factory
