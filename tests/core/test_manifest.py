"""A manifest file becomes typed resources, or one line that names file, line, field and fix."""

# ruff: noqa: E501  # the lines expected of the loader stay whole

from __future__ import annotations

from pathlib import Path

import pytest

from fermata.core.errors import ConfigError
from fermata.core.spec import Lorem, Script, load_manifests

GOOD = """\
apiVersion: fermata.dev/v1alpha1
kind: AgentDeployment
metadata:
  name: demo
spec:
  model:
    name: tiny
  routerPolicyRef: fast
  workers:
    - name: sim
      replicas: 2
      simulated:
        kvBlocks: 512
        responder: {type: Lorem, tokens: 8}
---
apiVersion: fermata.dev/v1alpha1
kind: RouterPolicy
metadata:
  name: fast
spec:
  scheduler:
    type: KVAware
    kvAware:
      temperature: 0.5
  sessionAffinity:
    ttl: 60
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return path


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_manifests(path)
    return str(caught.value)


def test_a_good_file_gives_the_deployment_and_the_policy_it_names(tmp_path: Path) -> None:
    manifests = load_manifests(write(tmp_path, GOOD))

    assert manifests.deployment.metadata.name == "demo"
    (group,) = manifests.deployment.spec.workers
    assert (group.name, group.replicas, group.simulated.kv_blocks) == ("sim", 2, 512)
    assert group.simulated.responder == Lorem(tokens=8)
    assert manifests.policy.metadata.name == "fast"
    assert manifests.policy.spec.scheduler.kv_aware.temperature == 0.5
    assert manifests.policy.spec.session_affinity.ttl_s == 60
    assert manifests.unused_policies == ()


def test_documents_may_come_in_any_order_with_empty_ones_between(tmp_path: Path) -> None:
    deployment, policy = GOOD.split("---\n")
    swapped = write(tmp_path, f"---\n{policy}---\n# nothing here\n---\n{deployment}")

    assert load_manifests(swapped).policy.metadata.name == "fast"


def test_a_deployment_without_a_reference_gets_a_policy_of_defaults(tmp_path: Path) -> None:
    manifests = load_manifests(write(tmp_path, GOOD.replace("  routerPolicyRef: fast\n", "")))

    assert manifests.policy.metadata.name == "default"
    assert manifests.policy.spec.scheduler.kv_aware.temperature == 0.0
    assert manifests.unused_policies == ("fast",)


def test_what_kubectl_writes_beside_the_spec_is_left_alone(tmp_path: Path) -> None:
    exported = GOOD.replace(
        "  name: demo\n",
        "  name: demo\n  creationTimestamp: 2026-01-01T00:00:00Z\n  resourceVersion: '7'\n",
    ).replace("spec:\n  model:", "status: {ready: true}\nspec:\n  model:")

    assert load_manifests(write(tmp_path, exported)).deployment.metadata.name == "demo"


def test_relative_paths_start_at_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "manifests"
    (folder / "model").mkdir(parents=True)
    (folder / "template.jinja").write_text("{{ messages }}")
    (folder / "script.yaml").write_text("rules: []")
    text = GOOD.replace(
        "    name: tiny\n", "    name: tiny\n    path: model\n    chatTemplate: template.jinja\n"
    ).replace("{type: Lorem, tokens: 8}", "{type: Script, path: ./script.yaml}")
    write(folder, text)
    monkeypatch.chdir(tmp_path)

    spec = load_manifests(Path("manifests/fleet.yaml")).deployment.spec

    assert spec.model.path == str(folder / "model")
    assert spec.model.chat_template == str(folder / "template.jinja")
    assert spec.workers[0].simulated.responder == Script(path=str(folder / "script.yaml"))


def test_an_alias_may_repeat_a_group(tmp_path: Path) -> None:
    text = GOOD.replace("    - name: sim\n", "    - &sim\n      name: sim\n").replace(
        "---\n", "    - <<: *sim\n      name: other\n---\n"
    )

    groups = load_manifests(write(tmp_path, text)).deployment.spec.workers

    assert [(g.name, g.replicas) for g in groups] == [("sim", 2), ("other", 2)]


# What is replaced in GOOD, by what, and the exact line (after the file's name) that must come out.
BAD: dict[str, tuple[str, str, str]] = {
    "unknown field, near one": (
        "      replicas: 2", "      replica: 2",
        ":11: AgentDeployment demo: spec.workers[0].replica: unknown field (did you mean replicas?)",
    ),
    "unknown field in snake case": (
        "        kvBlocks: 512", "        kv_blocks: 512",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kv_blocks: unknown field (did you mean kvBlocks?)",
    ),
    "unknown field with a unit": (
        "    ttl: 60", "    ttl_s: 60",
        ":26: RouterPolicy fast: spec.sessionAffinity.ttl_s: unknown field (did you mean ttl?)",
    ),
    "unknown field, near none": (
        "    type: KVAware", "    wibble: 3",
        ":22: RouterPolicy fast: spec.scheduler.wibble: unknown field (known here: type, kvAware, thunderAgent)",
    ),
    "unknown field at the top": (
        "metadata:\n  name: demo", "meta: 1\nmetadata:\n  name: demo",
        ":3: AgentDeployment demo: meta: unknown field (did you mean metadata?)",
    ),
    "field that is a number as key": (
        "    ttl: 60", "    ttl: 60\n    7: x",
        ":27: RouterPolicy fast: spec.sessionAffinity.7: unknown field (known here: mode, ttl)",
    ),
    "text for a number": (
        "replicas: 2", "replicas: two",
        ":11: AgentDeployment demo: spec.workers[0].replicas: expected a whole number, got the text 'two' (write digits)",
    ),
    "quoted number": (
        "kvBlocks: 512", "kvBlocks: '512'",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kvBlocks: expected a whole number, got the text '512'"
        " (write 512 without quotes)",
    ),
    "fraction for a whole number": (
        "replicas: 2", "replicas: 2.5",
        ":11: AgentDeployment demo: spec.workers[0].replicas: expected a whole number, got the number 2.5 (write 2)",
    ),
    "exponent without a point": (
        "temperature: 0.5", "temperature: 1e-1",
        ":24: RouterPolicy fast: spec.scheduler.kvAware.temperature: expected a number, got the text '1e-1'"
        " (write 0.1 without quotes)",
    ),
    "truth for a number": (
        "kvBlocks: 512", "kvBlocks: yes",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kvBlocks: expected a whole number, got true (write digits)",
    ),
    "text for truth": (
        "kvBlocks: 512", "kvEvents: 'on'",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kvEvents: expected true or false, got the text 'on'"
        " (write true or false)",
    ),
    "number for text": (
        "    name: tiny", "    name: 7",
        ":7: AgentDeployment demo: spec.model.name: expected text, got the number 7 (put it in quotes)",
    ),
    "nothing for text": (
        "    name: tiny", "    name:",
        ":7: AgentDeployment demo: spec.model.name: expected text, got nothing (write text)",
    ),
    "empty text": (
        "    name: tiny", "    name: ''",
        ":7: AgentDeployment demo: spec.model.name: is empty (fill it in)",
    ),
    "too low": (
        "kvBlocks: 512", "kvBlocks: 0",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kvBlocks: 0 is too low (use at least 1)",
    ),
    "too low, strictly": (
        "    ttl: 60", "    ttl: 0",
        ":26: RouterPolicy fast: spec.sessionAffinity.ttl: 0 is too low (use above 0 and at most 3.1536e+07)",
    ),
    "too high": (
        "temperature: 0.5", "temperature: 101",
        ":24: RouterPolicy fast: spec.scheduler.kvAware.temperature: 101 is too high (use at most 100 and at least 0)",
    ),
    "not finite": (
        "temperature: 0.5", "temperature: .nan",
        ":24: RouterPolicy fast: spec.scheduler.kvAware.temperature: expected a number, got nan (write a finite number)",
    ),
    "bad choice, near one": (
        "type: KVAware", "type: kv_aware",
        ":22: RouterPolicy fast: spec.scheduler.type: the text 'kv_aware' is no choice"
        " (did you mean KVAware? use KVAware | LeastLoaded | RoundRobin | ThunderAgent)",
    ),
    "bad choice, near none": (
        "type: KVAware", "type: 9",
        ":22: RouterPolicy fast: spec.scheduler.type: the number 9 is no choice"
        " (use KVAware | LeastLoaded | RoundRobin | ThunderAgent)",
    ),
    "bad responder": (
        "{type: Lorem, tokens: 8}", "{type: Parrot}",
        ":14: AgentDeployment demo: spec.workers[0].simulated.responder.type: the text 'Parrot' is no choice"
        " (use Echo | Lorem | Script)",
    ),
    "responder without type": (
        "{type: Lorem, tokens: 8}", "{tokens: 8}",
        ":14: AgentDeployment demo: spec.workers[0].simulated.responder: 'type' is missing (add type: Echo or Lorem or Script)",
    ),
    "field of another responder": (
        "{type: Lorem, tokens: 8}", "{type: Echo, tokens: 8}",
        ":14: AgentDeployment demo: spec.workers[0].simulated.responder.tokens: unknown field (known here: nothing)",
    ),
    "responder as text": (
        "{type: Lorem, tokens: 8}", "Echo",
        ":14: AgentDeployment demo: spec.workers[0].simulated.responder: expected a mapping with 'type',"
        " got the text 'Echo' (write {type: Echo})",
    ),
    "missing field": (
        "    - name: sim\n      replicas: 2", "    - replicas: 2",
        ":10: AgentDeployment demo: spec.workers[0]: 'name' is missing (add name)",
    ),
    "no workers": (
        GOOD[GOOD.index("  workers:"):GOOD.index("---")], "  workers: []\n",
        ":9: AgentDeployment demo: spec.workers: needs at least 1 item (add one)",
    ),
    "mapping for a list": (
        GOOD[GOOD.index("    - name: sim"):GOOD.index("---")], "    sim: {}\n",
        ":9: AgentDeployment demo: spec.workers: expected a list, got a mapping (start each item with '- ')",
    ),
    "list for a mapping": (
        "    name: tiny", "    - tiny",
        ":6: AgentDeployment demo: spec.model: expected a mapping, got a list"
        " (known here: name, aliases, path, contextLength, toolCallParser, reasoningParser, chatTemplate)",
    ),
    "bad name": (
        "  name: demo", "  name: Demo_1",
        ":4: AgentDeployment Demo_1: metadata.name: 'Demo_1' is no valid name"
        " (use lower-case letters, digits and '-', starting and ending with a letter or digit)",
    ),
    "long name": (
        "  name: demo", f"  name: {'a' * 64}",
        f":4: AgentDeployment {'a' * 64}: metadata.name: has 64 characters (use at most 63)",
    ),
    "key of a map": (
        "  routerPolicyRef: fast", "  routerPolicyRef: fast\n  frontend: {apiKeys: {1: x}}",
        ":9: AgentDeployment demo: spec.frontend.apiKeys.1: a key must be text, got the number 1 (put it in quotes)",
    ),
    "value of a map": (
        "  routerPolicyRef: fast", "  routerPolicyRef: fast\n  frontend:\n    apiKeys:\n      abc: 3",
        ":11: AgentDeployment demo: spec.frontend.apiKeys.abc: expected text, got the number 3 (put it in quotes)",
    ),
    "group named twice": (
        "---\n", "    - name: sim\n---\n",
        ":15: AgentDeployment demo: spec.workers[1].name: 'sim' is used twice (give each group its own name)",
    ),
    "group named like a component": (
        "    - name: sim", "    - name: router",
        ":10: AgentDeployment demo: spec.workers[0].name: 'router' is the name of a component (use another name)",
    ),
    "page that does not divide": (
        "      replicas: 2", "      blockSize: 48",
        ":11: AgentDeployment demo: spec.workers[0].blockSize: 48 does not divide routingBlockSize 64"
        " (use a divisor of routingBlockSize)",
    ),
    "thresholds crossed": (
        "    kvAware:\n      temperature: 0.5", "    thunderAgent: {pauseTarget: 0.99}",
        ":23: RouterPolicy fast: spec.scheduler.thunderAgent.pauseTarget: 0.99 is above pauseThreshold 0.95"
        " (lower it to pauseThreshold or below)",
    ),
    "hysteresis above the threshold": (
        "    kvAware:\n      temperature: 0.5", "    thunderAgent: {resumeHysteresis: 0.99}",
        ":23: RouterPolicy fast: spec.scheduler.thunderAgent.resumeHysteresis: 0.99 is above pauseThreshold 0.95"
        " (lower it to pauseThreshold or below)",
    ),
    "hard affinity under ThunderAgent": (
        "    type: KVAware\n    kvAware:\n      temperature: 0.5\n  sessionAffinity:",
        "    type: ThunderAgent\n  sessionAffinity:\n    mode: Hard",
        ":24: RouterPolicy fast: spec.sessionAffinity.mode: Hard affinity leaves ThunderAgent nowhere to resume"
        " a program (use Soft)",
    ),
    "real engine in fast motion": (
        "  routerPolicyRef: fast\n  workers:\n", "  routerPolicyRef: fast\n  clock: {speedup: 2}\n  workers:\n"
        "    - {name: real, engine: VLLM}\n",
        ":9: AgentDeployment demo: spec.clock.speedup: group 'real' is a real engine (set it to 1)",
    ),
    "real engine without a model": (
        "      replicas: 2", "      engine: SGLang",
        ":6: AgentDeployment demo: spec.model.path: group 'sim' is a real engine (name the model's folder)",
    ),
    "control character": (
        "name: tiny", "name: \x07tiny",
        ":7: not valid YAML: character '\\x07' is not allowed (remove it)",
    ),
    "date for text": (
        "    name: tiny", "    name: 2026-01-01",
        ":7: AgentDeployment demo: spec.model.name: expected text, got 2026-01-01 (date) (write text)",
    ),
    "text of no number": (
        "kvBlocks: 512", "kvBlocks: '2.5'",
        ":13: AgentDeployment demo: spec.workers[0].simulated.kvBlocks: expected a whole number, got the text '2.5'"
        " (write digits)",
    ),
    "policy that is not there": (
        "routerPolicyRef: fast", "routerPolicyRef: fasst",
        ":8: AgentDeployment demo: spec.routerPolicyRef: no RouterPolicy 'fasst' in this file (add it, or name fast)",
    ),
    "no policy at all": (
        GOOD[GOOD.index("---"):], "",
        ":8: AgentDeployment demo: spec.routerPolicyRef: no RouterPolicy 'fast' in this file"
        " (add it, or remove the field to use defaults)",
    ),
    "missing folder": (
        "    name: tiny", "    name: tiny\n    path: nowhere",
        ":8: AgentDeployment demo: spec.model.path: no folder 'nowhere' (a relative path starts at FOLDER)",
    ),
    "missing script": (
        "{type: Lorem, tokens: 8}", "{type: Script, path: gone.yaml}",
        ":14: AgentDeployment demo: spec.workers[0].simulated.responder.path: no file 'gone.yaml'"
        " (a relative path starts at FOLDER)",
    ),
    "two deployments": (
        "kind: RouterPolicy\nmetadata:\n  name: fast\nspec:\n" + GOOD[GOOD.index("  scheduler:"):],
        "kind: AgentDeployment\nmetadata: {name: again}\nspec: {model: {name: m}, workers: [{name: w}]}\n",
        ":16: AgentDeployment again: a second one, after demo on line 1 (keep one a file)",
    ),
    "policy twice": (
        GOOD[GOOD.index("---"):], 2 * "---\napiVersion: fermata.dev/v1alpha1\nkind: RouterPolicy\nmetadata: {name: fast}\n",
        ":20: RouterPolicy fast: named twice, first on line 16 (rename or remove one)",
    ),
    "wrong apiVersion": (
        "apiVersion: fermata.dev/v1alpha1\nkind: AgentDeployment", "apiVersion: apps/v1\nkind: AgentDeployment",
        ":1: apiVersion: the text 'apps/v1' is not ours (use fermata.dev/v1alpha1)",
    ),
    "no apiVersion": (
        "apiVersion: fermata.dev/v1alpha1\nkind: AgentDeployment", "kind: AgentDeployment",
        ":1: apiVersion is missing (add apiVersion: fermata.dev/v1alpha1)",
    ),
    "wrong kind": (
        "kind: AgentDeployment", "kind: AgentDeploymnet",
        ":2: kind: the text 'AgentDeploymnet' is not ours (use AgentDeployment)",
    ),
    "kind of another": (
        "kind: AgentDeployment", "kind: Pod",
        ":2: kind: the text 'Pod' is not ours (use AgentDeployment or RouterPolicy)",
    ),
    "document that is a list": (
        "---\n", "---\n- 1\n---\n",
        ":16: a document must be a mapping, got a list (start it with apiVersion: fermata.dev/v1alpha1)",
    ),
    "key twice": (
        "      replicas: 2", "      replicas: 2\n      replicas: 3",
        ":12: spec.workers[0].replicas is written twice, first on line 11 (keep one)",
    ),
    "alias into itself": (
        "      replicas: 2", "      engineArgs: &loop {again: *loop}",
        ":11: an alias contains itself (write the value out)",
    ),
    "tab": (
        "      replicas: 2", "\treplicas: 2",
        ":11: not valid YAML: found character '\\t' that cannot start any token (indent with spaces)",
    ),
    "bad indentation": (
        "      replicas: 2", "     replicas: 2",
        ":11: not valid YAML: expected <block end>, but found '<block mapping start>'"
        " (check indentation, colons and quotes there)",
    ),
    "open quote": (
        "    ttl: 60", "    ttl: '60",
        ":26: not valid YAML: found unexpected end of stream (check indentation, colons and quotes there)",
    ),
    "object of another language": (
        "replicas: 2", "replicas: !!python/name:os.system 2",
        ":11: not valid YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:python/name:os.system'"
        " (check indentation, colons and quotes there)",
    ),
    "impossible date": (
        "replicas: 2", "replicas: 2001-13-45",
        ": not valid YAML: month must be in 1..12 (put it in quotes)",
    ),
    "nothing in the file": (
        GOOD, "# soon\n",
        ": holds no AgentDeployment (add one with apiVersion: fermata.dev/v1alpha1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_manifest_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    old, new, expected = BAD[case]
    assert GOOD.count(old) == 1, "the case must change exactly one place"
    path = write(tmp_path, GOOD.replace(old, new))

    line = error_of(path)

    assert line == f"{path}{expected}".replace("FOLDER", str(tmp_path))
    assert "\n" not in line


def test_of_several_mistakes_the_first_in_the_file_is_told(tmp_path: Path) -> None:
    text = GOOD.replace("kvBlocks: 512", "kvBlocks: 0").replace("    name: tiny", "    name: ''")

    assert ":7: AgentDeployment demo: spec.model.name" in error_of(write(tmp_path, text))


def test_a_file_that_can_not_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.yaml").endswith("none.yaml: no such file (check the path)")
    assert error_of(tmp_path).endswith(": is a folder (name a YAML file)")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    assert error_of(latin).endswith("latin.yaml:2: is not UTF-8 (save it as UTF-8)")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1 << 20) + b"\n")
    assert error_of(big).endswith("big.yaml: is above 1048576 bytes (name a manifest)")
