from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from heats.compose import Composer, config_error
from heats.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hydra.core.config_loader import ConfigLoader

FILES = {
    "config.yaml": """
        defaults: [{db: mysql}, {aux@second: one}, {optional extra: null}, _self_]
        lr: 0.1
        batch_size: 32
        name: "${db.name}-${hydra:job.num}"
        when: ${now:%H%M%S%f}
        missing: ???
        nothing: null
        layers: [1, 2]
        model: {name: m, dim: 3, lr: "${lr}", deep: {a: 1}}
        hydra:
          job: {config: {override_dirname: {exclude_keys: [seed]}}}
        seed: 0
        """,
    "db/mysql.yaml": "{name: my, user: root}",
    "db/postgres.yaml": "{name: pg, port: 5432}",
    "aux/one.yaml": "{n: 1}",
    "aux/two.yaml": "{n: 2}",
    "extra/more.yaml": "{more: 1}",
    "typed.yaml": "{defaults: [heats_test_schema, _self_]}",
}


class Color(Enum):
    red = 1
    blue = 2


@dataclasses.dataclass
class Schema:
    lr: float = 0.1
    color: Color = Color.red
    flags: dict[str, int] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module")
def conf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conf")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        lines = [line.removeprefix("        ") for line in text.splitlines()]
        path.write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loader(conf_dir: Path) -> Iterator[ConfigLoader]:
    ConfigStore.instance().store("heats_test_schema", Schema)
    with initialize_config_dir(str(conf_dir), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def master(loader: ConfigLoader, *overrides: str, config_name: str = "config") -> DictConfig:
    """The config that a sweeper gets."""
    return loader.load_configuration(config_name, list(overrides), RunMode.MULTIRUN)


@pytest.fixture(scope="module")
def sweep(loader: ConfigLoader) -> DictConfig:
    return master(loader, "lr=1,2", "hydra.verbose=true", "hydra.sweep.dir=out")


@pytest.fixture(scope="module")
def composer(loader: ConfigLoader, sweep: DictConfig) -> Composer:
    return Composer(loader, sweep)


def by_hydra(
    loader: ConfigLoader, master: DictConfig, overrides: list[str], number: int
) -> DictConfig:
    """What Hydra's basic launcher hands to a job."""
    config = loader.load_sweep_config(master, overrides)
    with open_dict(config):
        config.hydra.job.id = number
        config.hydra.job.num = number
    return config


def everything(config: DictConfig) -> list[Any]:
    """All there is to a config: its content before and after resolving, types, flags, cache."""
    resolved: Any = None
    with contextlib.suppress(OmegaConfBaseException):
        resolved = OmegaConf.to_container(config.hydra.sweep, resolve=True)
    return [OmegaConf.to_yaml(config), nodes(config), resolved, OmegaConf.get_cache(config)]


def nodes(node: Any) -> list[Any]:
    meta = node._metadata
    seen: list[Any] = [type(node), meta.ref_type, meta.object_type, meta.optional, meta.flags]
    content = node.__dict__.get("_content", node.__dict__.get("_val"))
    if isinstance(content, dict):
        return [*seen, [(key, nodes(child)) for key, child in content.items()]]
    if isinstance(content, list):
        return [*seen, [nodes(child) for child in content]]
    return [*seen, content]


# --- equality with Hydra ------------------------------------------------------------------------

numbers = st.integers(-5, 5) | st.floats(-1, 1)
override_texts = st.one_of(
    st.builds("lr={!r}".format, numbers),
    st.builds("model.dim={}".format, numbers),
    st.builds("db={}".format, st.sampled_from(["mysql", "postgres"])),
    st.builds("aux@second={}".format, st.sampled_from(["one", "two"])),
    st.builds("+extra2.x={}".format, numbers),
    st.builds("++model.extra={}".format, numbers),
    st.sampled_from(
        [
            "name='a b, c'",
            "name=${model.name}",
            "model.deep.a=${lr}",
            "layers=[3,'4']",
            "layers.0=7",
            "model.deep={a:2}",
            "+model.deep={b:2}",
            "+w=null",
            "+w={a:1,b:{c:2}}",
            "db.user=bob",
            "db={name:other}",
            "db.port=1",
            "extra=more",
            "+aux=two",
            "+aux@third=two",
            "~seed",
            "~model.name",
            "~model.name=m",
            "~db",
            "~aux@second",
            "seed=7",
            "missing=1",
            "nothing=x",
            "lr=",
            "hydra.job.name=x",
            "hydra.sweep.subdir=${lr}_${hydra.job.num}",
            "nosuch=1",
            "model.nosuch=1",
            "db=nosuch",
            "aux@nosuch=one",
            "dbx@nosuch=one",
            "+lr=1",
            "~nosuch",
        ]
    ),
)


@pytest.mark.timeout(60)  # Hydra itself takes most of the time.
@settings(max_examples=10, deadline=None)
@given(st.lists(override_texts, max_size=5), st.integers(0, 5), st.integers(0, 99))
def test_config_is_what_hydra_composes(
    loader: ConfigLoader,
    composer: Composer,
    sweep: DictConfig,
    texts: list[str],
    num_fixed: int,
    number: int,
) -> None:
    """All examples share a composer: so its memory of compositions is put to the test too."""
    own, fixed = texts[num_fixed:], texts[:num_fixed]
    if num_fixed > 2 and fixed:
        composer = Composer(loader, sweep, fixed)
    else:
        own, fixed = texts, []
    try:
        expected = by_hydra(loader, sweep, [*own, *fixed], number)
    except (HydraException, OmegaConfBaseException, ValueError):
        with pytest.raises(ConfigError):
            composer.compose(own, number=number)
        return
    assert everything(composer.compose(own, number=number)) == everything(expected)


def test_job_has_its_number_overrides_and_dirname(composer: Composer) -> None:
    config = composer.compose(["lr=3", "db=postgres", "seed=1", "~batch_size"], number=7)
    assert (config.hydra.job.num, config.hydra.job.id) == (7, "7")
    assert config.hydra.overrides.task == ["lr=3", "db=postgres", "seed=1", "~batch_size"]
    assert (
        config.hydra.overrides.hydra
        == [
            "hydra.verbose=true",
            "hydra.sweep.dir=out",
            "hydra.mode=MULTIRUN",
        ][: len(config.hydra.overrides.hydra)]
    )
    assert config.hydra.job.override_dirname == "db=postgres,lr=3,~batch_size"
    assert config.hydra.job.config_name == "config"
    assert config.hydra.runtime.choices.db == "postgres"


def test_fixed_overrides_follow_the_trials_own(loader: ConfigLoader, sweep: DictConfig) -> None:
    composer = Composer(loader, sweep, ["db.port=1", "~seed"])
    config = composer.compose(["db=postgres"], number=0)
    assert config.db.port == 1
    assert config.hydra.overrides.task == ["db=postgres", "db.port=1", "~seed"]


def test_time_is_the_same_in_every_trial(loader: ConfigLoader) -> None:
    sweep = master(loader)
    started = sweep.when
    composer = Composer(loader, sweep)
    assert {composer.compose([f"lr={n}"], number=n).when for n in range(3)} == {started}


def test_change_in_one_trial_does_not_reach_the_next(composer: Composer) -> None:
    first = composer.compose(["lr=3"], number=0)
    first.model.deep.a = 99
    first.hydra.job.name = "changed"
    second = composer.compose(["lr=3"], number=0)
    assert second.model.deep.a == 1
    assert second.hydra.job.name != "changed"


def test_full_composition_is_paid_once_for_each_choice_of_groups(
    loader: ConfigLoader, sweep: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid = []
    load = loader.load_sweep_config

    def counting(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        paid.append(sweep_overrides)
        return load(master_config, sweep_overrides)

    monkeypatch.setattr(loader, "load_sweep_config", counting)
    composer = Composer(loader, sweep)
    for number in range(20):
        db = ("mysql", "postgres")[number % 2]
        composer.compose([f"lr={number}", f"db={db}", f"+w={number}", "~seed"], number=number)
    assert paid == [["db=mysql"], ["db=postgres"]]


def test_config_that_cannot_be_pickled_is_composed_all_the_same(loader: ConfigLoader) -> None:
    @dataclasses.dataclass
    class Local:
        x: int = 1

    ConfigStore.instance().store("heats_test_local", Local)
    composer = Composer(loader, master(loader, config_name="heats_test_local"))
    assert [composer.compose([f"x={n}"], number=n).x for n in range(2)] == [0, 1]


def test_group_options_are_those_of_hydra(composer: Composer) -> None:
    assert composer.group_options("db") == ["mysql", "postgres"]
    assert composer.group_options("lr") == []


def test_composing_is_cheap(composer: Composer) -> None:
    composer.compose(["lr=0.5"], number=0)
    durations = []
    for number in range(20):
        started = time.perf_counter()
        composer.compose([f"lr={number}", "db=mysql", "model.dim=4"], number=number)
        durations.append(time.perf_counter() - started)
    assert min(durations) < 0.02  # 3 ms on an idle machine; Hydra takes 30 to 100 ms.


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lrr=1", "Unknown config key: 'lrr'. Did you mean 'lr'? Known: lr, "),
        ("momentum=1", "To add a new key, write +momentum=..."),
        ("model.dimm=1", "'model.dimm'. Did you mean 'model.dim'?"),
        ("model.name.x=1", "'model.name.x'"),
        ("~nothing", "'nothing' is null already"),
        ("~lrr", "Did you mean 'lr'?"),
        (
            "db=mysq",
            "option of config group 'db': 'mysq'. Did you mean 'mysql'? Known: mysql, post",
        ),
        ("db.port=1", "Unknown config key: 'db.port'"),
        ("+lr=1", "An item is already at 'lr'"),
        ("aux@nosuch=one", "Could not override 'aux@nosuch'"),
        ("nosuch@x=one", "config group 'nosuch' does not exist"),
        ("++db=mysql", "force-add of config groups is not supported"),
        ("lr=[1", "lr=[1 cannot be read"),
        ("lr=1,2", "a single trial needs one value"),
    ],
)
def test_wrong_override_is_told_in_one_message(
    composer: Composer, override: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.compose([override], number=0)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lr=fast", "lr=fast is not valid: Value 'fast' of type 'str' could not be converted"),
        ("color=green", "color=green is not valid: Invalid value 'green', expected one of [red, "),
        ("+flags.x=y", "flags.x=y is not valid"),
        (f"lr={'x' * 500}", "x is not valid"),
    ],
)
def test_wrong_type_names_key_and_value(loader: ConfigLoader, override: str, told: str) -> None:
    composer = Composer(loader, master(loader, config_name="typed"))
    with pytest.raises(ConfigError) as caught:
        composer.compose([override], number=0)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def hydra_raises(loader: ConfigLoader, *overrides: str, config_name: str = "config") -> Exception:
    try:
        loader.load_configuration(config_name, list(overrides), RunMode.RUN)
    except (HydraException, OmegaConfBaseException) as exc:
        return exc
    raise AssertionError("Hydra took it")


def test_errors_of_hydra_itself_are_translated(loader: ConfigLoader, composer: Composer) -> None:
    keys = composer.known_keys()
    told = [
        (hydra_raises(loader, "lrr=1"), "Did you mean 'lr'?"),
        (hydra_raises(loader, "db=nosuch"), "Known: mysql, postgres."),
        (hydra_raises(loader, "x=[1"), "x=[1 cannot be read"),
        (hydra_raises(loader, "lr=1,2"), "Ambiguous value for argument 'lr=1,2'"),
        (hydra_raises(loader, config_name="nosuch"), "nosuch"),
    ]
    for exc, message in told:
        assert message in str(config_error(exc, keys))
        assert "\n" not in str(config_error(exc, keys))


def test_errors_met_while_resolving_are_translated() -> None:
    config = OmegaConf.create({"a": "${b}", "lr": "???"})
    OmegaConf.set_struct(config, True)
    told = {"a": "a is not valid: Interpolation key 'b' not found", "lr": "lr has no value"}
    for key, message in {**told, "lrr": "Did you mean 'lr'?"}.items():
        with pytest.raises(OmegaConfBaseException) as caught:
            OmegaConf.to_container(config, resolve=True, throw_on_missing=True) if key == "a" else (
                config[key]
            )
        assert message in str(config_error(caught.value, ["a", "lr"]))


def test_config_error_among_the_causes_is_the_message() -> None:
    inner = ConfigError("n_trials=0 is not valid: give 1 or more")
    outer = HydraException("Error instantiating")
    outer.__cause__ = inner
    assert config_error(outer) is inner


def test_of_many_keys_only_the_nearest_and_those_beside_are_listed() -> None:
    config = OmegaConf.create({"lr": 1, "model": {f"key{n}": n for n in range(500)}})
    OmegaConf.set_struct(config, True)
    keys = ["lr", "model", *(f"model.key{n}" for n in range(500))]
    with pytest.raises(OmegaConfBaseException) as caught:
        config.lrr = 1
    message = str(config_error(caught.value, keys))
    assert "Did you mean 'lr'? Known: lr, model." in message


def test_importing_the_module_loads_neither_hydra_nor_optuna() -> None:
    code = "import heats.compose, sys; print({'hydra', 'omegaconf', 'optuna'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
