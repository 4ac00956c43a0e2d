"""Keys, metrics and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fermata.core.errors import ConfigError
from fermata.frontend.cli import configure
from fermata.frontend.keys import ApiKeys
from fermata.frontend.metrics import Histogram

DEPLOYMENT = {
    "apiVersion": "fermata.dev/v1alpha1",
    "kind": "AgentDeployment",
    "metadata": {"name": "d"},
    "spec": {"model": {"name": "m", "aliases": ["n"]}, "workers": [{"name": "sim"}]},
}


def flags(file: Path, **changes: str) -> list[str]:
    said = {
        "--id": "frontend-3",
        "--deployment": str(file),
        "--routers": "router-0=tcp://h:1",
        **changes,
    }
    return [word for pair in said.items() for word in pair]


def deployment_file(folder: Path, **model: Any) -> Path:
    said = json.loads(json.dumps(DEPLOYMENT))
    said["spec"]["model"].update(model)
    file = folder / "deployment.json"
    file.write_text(json.dumps(said))
    return file


def test_flags_and_file_become_one_value(tmp_path: Path) -> None:
    argv = flags(
        deployment_file(tmp_path), **{"--routers": "a=tcp://h:1, b=tcp://h:2", "--epoch": "4"}
    )
    config, folder, keys = configure([*argv, "--port", "8123", "--reuse-port"])
    assert config.ring.members == {"a": "tcp://h:1", "b": "tcp://h:2"}
    assert (config.id, config.ring.epoch, config.port, config.reuse_port) == (
        "frontend-3",
        4,
        8123,
        True,
    )
    assert config.model_names == ("m", "n")
    assert folder.tokenizer_file.is_file()
    assert keys is None


@pytest.mark.parametrize(
    ("change", "where"),
    [({"--routers": "nothing"}, "--routers"), ({"--deployment": "/no/such/file"}, "/no/such/file")],
)
def test_a_wrong_flag_is_named_with_its_fix(
    tmp_path: Path, change: dict[str, str], where: str
) -> None:
    with pytest.raises(ConfigError) as error:
        configure(flags(deployment_file(tmp_path), **change))
    assert error.value.where == where
    assert error.value.fix


def test_a_wrong_file_is_named_with_its_field(tmp_path: Path) -> None:
    file = deployment_file(tmp_path, contextLength=0)
    with pytest.raises(ConfigError, match="contextLength"):
        configure(flags(file))


def test_a_model_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        configure(flags(deployment_file(tmp_path, path="models/x")))
    assert error.value.where == str(tmp_path / "models/x")


def test_keys_name_tenants_and_scopes_without_telling_the_key() -> None:
    keys = ApiKeys({"secret": "acme"})
    caller = keys.caller({"authorization": "bearer secret"})
    assert caller is not None
    assert caller.tenant == "acme"
    assert "secret" not in caller.scope
    assert keys.caller({"x-api-key": "secret"}) == caller
    assert keys.caller({"authorization": "Bearer wrong"}) is None
    assert keys.caller({}) is None


def test_without_keys_everyone_is_served_in_one_namespace() -> None:
    keys = ApiKeys({})
    one, two = (
        keys.caller({"authorization": "Bearer a"}),
        keys.caller({"authorization": "Bearer b"}),
    )
    nobody = keys.caller({})
    assert one is not None
    assert two is not None
    assert nobody is not None
    assert one.tenant == two.tenant == nobody.tenant == ""
    assert len({one.scope, two.scope, nobody.scope}) == 3


def test_a_histogram_counts_by_upper_bound() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 104.0
