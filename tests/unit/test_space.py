from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from heats.errors import ConfigError
from heats.override import element_text
from heats.space import SearchSpace, parse_space

INT, FLOAT, CHOICE = IntDistribution, FloatDistribution, CategoricalDistribution


def read(text: str) -> Any:
    """The value that a job would get for an override value."""
    return OverridesParser.create().parse_override(f"k={text}").value()


def options(group: str) -> list[str]:
    return {"db": ["mysql", "postgres", "sqlite"], "db/old": ["oracle"]}.get(group, [])


# --- the grammar --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "distribution"),
    [
        ("a,b", CHOICE(["a", "b"])),
        ("choice(1,2)", CHOICE([1, 2])),
        ("choice(a)", CHOICE(["a"])),
        ("sort(3,1,2)", CHOICE([1, 2, 3])),
        ("sort(3,1,2,reverse=true)", CHOICE([3, 2, 1])),
        ("shuffle(c,a,b)", CHOICE(["c", "a", "b"])),
        ("shuffle(range(1,4))", CHOICE([1, 2, 3])),
        ("float(choice(1,2))", CHOICE([1.0, 2.0])),
        ("str(choice(1,2))", CHOICE(["1", "2"])),
        ("bool(choice(0,1))", CHOICE([False, True])),
        ("tag(log,choice(1,2))", CHOICE([1, 2])),
        ("true,false", CHOICE([True, False])),
        ("null,true,3", CHOICE(["null", True, 3])),
        ("[1,2],[3]", CHOICE(["[1,2]", "[3]"])),
        ("{a:5},{a:6}", CHOICE(["{a:5}", "{a:6}"])),
        ("range(1,4)", INT(1, 3)),
        ("range(3)", INT(0, 2)),
        ("range(0,10,3)", INT(0, 9, step=3)),
        ("range(3,1,-1)", INT(2, 3)),
        ("sort(range(3,1,-1))", INT(2, 3)),
        ("int(range(1.0,4.0))", INT(1, 3)),
        ("float(range(1,4))", FLOAT(1.0, 3.0, step=1.0)),
        ("range(0,1,0.1)", FLOAT(0.0, 0.9, step=0.1)),
        ("range(0.7,1.0,0.1)", FLOAT(0.7, 0.9, step=0.1)),
        ("interval(1,10)", FLOAT(1.0, 10.0)),
        ("interval(0.5,0.5)", FLOAT(0.5, 0.5)),
        ("int(interval(-3.0,3.9))", INT(-3, 3)),
        ("tag(log,interval(1e-5,1e-1))", FLOAT(1e-5, 1e-1, log=True)),
        ("tag(log, int(interval(1, 100)))", INT(1, 100, log=True)),
        ("int(tag(log,interval(1,100)))", INT(1, 100, log=True)),
        ("tag(mine,interval(0,1))", FLOAT(0.0, 1.0)),
    ],
)
def test_sweep_becomes_its_distribution(text: str, distribution: BaseDistribution) -> None:
    for space in (parse_space({"x": text}, []), parse_space(None, [f"x={text}"])):
        assert space.dimensions == {"x": distribution}
        assert space.fixed == ()


@pytest.mark.parametrize("key", ["lr", "+w", "++model.extra", "db", "aux@second", "net/layer"])
def test_key_is_kept_as_typed(key: str) -> None:
    assert list(parse_space(None, [f"{key}=a,b"]).dimensions) == [key]


def test_tag_log_on_a_range_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    space = parse_space(None, ["x=tag(log,range(1,9))"])
    assert space.dimensions == {"x": INT(1, 8)}
    assert "write tag(log, int(interval(a, b)))" in caplog.text


def test_glob_takes_the_options_of_its_group() -> None:
    space = parse_space(None, ["db=glob(*,exclude=my*)"], options)
    assert space.dimensions == {"db": CHOICE(["postgres", "sqlite"])}


def test_equal_choices_are_merged_and_look_alikes_kept_apart() -> None:
    assert parse_space(None, ["x=a,'a',b"]).dimensions == {"x": CHOICE(["a", "b"])}
    space = parse_space(None, ["x=1,1.0,true,'1'"])
    assert space.dimensions == {"x": CHOICE(["1", "1.0", "True", "'1'"])}
    assert [c.value for c in space.categories["x"]] == [1, 1.0, True, "1"]
    assert [type(read(c.text)) for c in space.categories["x"]] == [int, float, bool, str]


def test_null_and_the_text_null_are_two_choices() -> None:
    space = parse_space(None, ["x=null,'null'"])
    values = [space.values({"x": c.stored})["x"] for c in space.categories["x"]]
    assert values == [None, "null"]


# --- precedence ---------------------------------------------------------------------------------


def test_command_line_replaces_params() -> None:
    params = {"a": "1,2", "b": "3", "c": "choice(x,y)", "d": "4"}
    space = parse_space(params, ["a=5", "b=interval(0,1)", "c=p,q", "e=6"])
    assert space.dimensions == {"b": FLOAT(0, 1), "c": CHOICE(["p", "q"])}
    assert space.fixed == ("a=5", "d=4", "e=6")


def test_later_entry_keeps_the_plus_of_the_one_it_replaces() -> None:
    space = parse_space({"+w": "1,2", "++v": "1"}, ["w=3,4", "v=2"])
    assert space.dimensions == {"+w": CHOICE([3, 4])}
    assert space.fixed == ("++v=2",)


def test_deletion_is_fixed_and_ends_the_sweep_of_its_key() -> None:
    space = parse_space({"x": "1,2"}, ["~x", "~model.name=m", "~aux@second"])
    assert space.dimensions == {}
    assert space.fixed == ("~x", "~model.name=m", "~aux@second")


def test_fixed_values_stay_as_typed() -> None:
    fixed = ("s='a,b'", "l=[1, 2]", "e=", "i=${x}")
    assert parse_space(None, fixed).fixed == fixed


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x=choice()", "empty choice is not legal"),
        ("x=choice(null,1)", "Write null among plain values: x=null,a,b"),
        ("x=interval(5,1)", "Write interval(1.0, 5.0)"),
        ("x=interval(nan,1)", "finite"),
        ("x=interval(0,inf)", "finite"),
        ("x=interval(-1e308,1e308)", "finite"),
        ("x=range(1,10,0)", "the step is 0"),
        ("x=range(1.0,2.0,0.0)", "the step is 0"),
        ("x=range(5,1)", "empty"),
        ("x=range(0,nan)", "finite"),
        ("x=tag(log,interval(0,1))", "above 0"),
        ("x=tag(log,int(interval(0,9)))", "above 0"),
        ("x=range(0,100000000000000000)", "2**53"),
        ("x=shuffle(range(0,1000000))", "1,000,000 choices"),
        ("x=choice(1,choice(2,3))", "inside a value"),
        ("x=[choice(1,2),3]", "inside a value"),
        ("x={a:range(3)}", "inside a value"),
        ("x=[1,2", "cannot be read"),
        ("x", "cannot be read"),
        ("x=nosuch(1,2)", "Unknown function 'nosuch'"),
        ("x=interval(a,b)", "cannot be read"),
        ("x=bool(interval(0,1))", "cannot be cast to bool"),
        ("x=glob(*)", "x is not a config group"),
        ("db=glob(z*)", "mysql, postgres, sqlite"),
        ("hydra.verbose=true,false", "cannot be swept"),
        ("hydra/launcher=a,b", "cannot be swept"),
        ("~x=1,2", "cannot be swept"),
    ],
)
def test_bad_override_is_refused_with_key_and_remedy(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_space(None, [text], options)
    message = str(caught.value)
    assert text.partition("=")[0].strip("~") in message
    assert told in message
    assert "\n" not in message


def test_wrong_option_of_a_group_lists_the_options_nearest_first() -> None:
    with pytest.raises(ConfigError, match=r"'postgre'.*'postgres'\? Known: postgres, mysql"):
        parse_space(None, ["db=mysql,postgre"], options)
    parse_space(None, ["db=mysql,old/oracle,sqlite.yaml,null"], options)


@pytest.mark.timeout(5)
def test_million_choices_are_refused_at_once_and_cut_short() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_space(None, [f"x={','.join(map(str, range(1_000_000)))}"])
    assert "1,000,000 choices" in str(caught.value)
    assert len(str(caught.value)) < 250


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^x=.* nested too deeply"):
        parse_space(None, ["x=" + "[" * 2000 + "]" * 2000])


def test_param_without_value_is_refused() -> None:
    none: Any = None
    with pytest.raises(ConfigError, match=r"params\.lr=null"):
        parse_space({"lr": none}, [])


# --- points -------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
primitives = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
dict_keys = st.from_regex(r"[a-z][a-z0-9_ :=,(){}\[\]\\]*[a-z]", fullmatch=True)
elements = st.recursive(
    primitives,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(dict_keys, inner, max_size=3),
    max_leaves=5,
)


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


@given(elements)
def test_text_of_a_value_parses_back_to_it(value: Any) -> None:
    assert same(read(element_text(value)), value)


@given(st.lists(elements, min_size=2, max_size=5))
def test_every_choice_reaches_the_job_unchanged(choices: list[Any]) -> None:
    space = parse_space(None, [f"+k@p={','.join(map(element_text, choices))}"])
    distribution = space.dimensions["+k@p"]
    assert isinstance(distribution, CategoricalDistribution)
    arrived = []
    for stored in distribution.choices:
        (override,) = space.overrides({"+k@p": stored})
        assert same(space.params([override]), {"+k@p": stored})
        arrived.append(read(override.removeprefix("+k@p=")))
    assert {repr(value) for value in arrived} == {repr(value) for value in choices}


@pytest.mark.parametrize("text", ["choice('a b','x,y')", "'a b','x,y'", 'choice("a b","x,y")'])
def test_quotes_are_not_part_of_the_value(text: str) -> None:
    space = parse_space(None, [f"x={text}"])
    assert space.values({"x": "x,y"}) == {"x": "x,y"}
    assert space.overrides({"x": "x,y"}) == ("x='x,y'",)


def test_stepped_floats_are_clean() -> None:
    space = parse_space(None, ["x=range(0,1,0.1)"])
    assert space.overrides({"x": 0.1 * 3}) == ("x=0.3",)
    assert [space.point(i)["x"] for i in range(10)] == [i / 10 for i in range(10)]


@given(st.floats(1e-12, 1e12))
def test_float_survives_the_text(value: float) -> None:
    space = parse_space(None, ["x=tag(log,interval(1e-12,1e12))"])
    (override,) = space.overrides({"x": value})
    assert read(override.removeprefix("x=")) == value
    assert space.params([override]) == {"x": value}


@pytest.mark.parametrize("overrides", [["x=9"], ["x=1.5"], ["y=1"], [], ["x=1", "y=1"], ["x=z"]])
def test_point_of_another_space_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="Start a new study"):
        parse_space(None, ["x=range(1,4)"]).params(overrides)


# --- grids --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "num_points", "is_grid"),
    [
        ([], 1, True),
        (["a=1,2", "b=x,y,z"], 6, True),
        (["a=range(0,10,3)", "b=x,y"], 8, False),
        (["a=range(0,1,0.25)"], 4, False),
        (["a=tag(log,int(interval(1,9)))"], 9, False),
        (["a=1,2", "b=interval(0,1)"], None, False),
        (["b=interval(1,1)"], 1, False),
    ],
)
def test_number_of_points(overrides: list[str], num_points: int | None, is_grid: bool) -> None:
    space = parse_space(None, overrides)
    assert (space.num_points(), space.is_grid) == (num_points, is_grid)


def test_points_come_in_the_order_of_hydras_own_sweeper() -> None:
    space = parse_space(None, ["b=x,y", "a=range(1,4)"])
    points = [space.overrides(space.point(i)) for i in range(6)]
    assert points == [(f"b={b}", f"a={a}") for b in "xy" for a in (1, 2, 3)]
    with pytest.raises(IndexError):
        space.point(6)


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-5, 5).filter(bool), st.booleans())
def test_range_has_hydras_values(start: int, stop: int, step: int, is_float: bool) -> None:
    """Quarters are exact in binary, so Hydra's own float ranges are right there."""
    text = f"{start / 4},{stop / 4},{step / 4}" if is_float else f"{start},{stop},{step}"
    sweep: Any = OverridesParser.create().parse_override(f"x=range({text})").value()
    values = list(sweep.range())
    if not values:
        with pytest.raises(ConfigError, match="empty"):
            parse_space(None, [f"x=range({text})"])
        return
    space = parse_space(None, [f"x=range({text})"])
    assert [space.point(i)["x"] for i in range(space.num_points() or 0)] == sorted(values)


# --- JSON ---------------------------------------------------------------------------------------


def test_json_round_trip_gives_an_equal_space() -> None:
    overrides = [
        "lr=tag(log,interval(1e-5,0.1))",
        "+n=range(1,9,2)",
        "x=null,[1,'2'],{a: b},'1',1,true,inf,'x y'",
        "one=choice('a,b')",
        "seed=3",
        "~z",
    ]
    space = parse_space(None, overrides)
    assert SearchSpace.from_json(json.loads(json.dumps(space.to_json(), allow_nan=False))) == space


def test_infinity_is_a_choice() -> None:
    space = parse_space(None, ["clip=1.0,inf"])
    assert space.values({"clip": "inf"}) == {"clip": math.inf}
    assert space.overrides({"clip": "inf"}) == ("clip=inf",)
