"""The deployment file that every process boots from: AgentDeployment as JSON, written by the
operator or `fermata up`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fermata.core.errors import ConfigError
from fermata.core.spec.agent_deployment import AgentDeployment


def read_deployment(path: Path) -> AgentDeployment:
    """Raises ConfigError naming the file, and the field where one is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=AgentDeployment)
    except OSError as error:
        raise ConfigError(
            f"can not be read: {error.strerror}",
            where=str(path),
            fix="give --deployment a JSON file",
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(str(error), where=str(path), fix="correct the field it names") from error
