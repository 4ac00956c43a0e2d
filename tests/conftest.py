"""Shared by all tests: how Hypothesis runs."""

from __future__ import annotations

import os

from hypothesis import settings

# In CI a failure must mean a change, not a new draw; elsewhere every run looks somewhere else.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
