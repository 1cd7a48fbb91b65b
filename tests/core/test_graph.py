"""Graphs of steps: examples for each answer, and properties against a slow, plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stanchion.core.graph import ancestors, cycle, dependants

Needs = dict[int, list[int]]

NODES_MAX = 8


@st.composite
def graphs(draw: st.DrawFn, *, circles: bool) -> Needs:
    size = draw(st.integers(0, NODES_MAX))
    nodes = draw(st.permutations(range(size)))
    return {
        node: draw(
            st.lists(st.sampled_from(range(size if circles else node)), max_size=4)
            if circles or node
            else st.just([])
        )
        for node in nodes
    }


def reachable(needs: Needs, root: int) -> set[int]:
    seen: set[int] = set()
    front = set(needs[root])
    while front:
        seen |= front
        front = {parent for node in front for parent in needs[node]} - seen
    return seen


def test_ancestors_are_needed_directly_or_through_others() -> None:
    needs = {"d": ["b", "c"], "c": ["a"], "b": ["a"], "a": [], "e": []}

    assert ancestors(needs) == {
        "a": frozenset(),
        "b": {"a"},
        "c": {"a"},
        "d": {"a", "b", "c"},
        "e": frozenset(),
    }


def test_no_graph_has_no_ancestors_dependants_or_circle() -> None:
    empty: dict[str, list[str]] = {}

    assert ancestors(empty) == {}
    assert dependants(empty) == {}
    assert cycle(empty) is None


def test_dependants_come_once_each_in_the_order_of_the_graph() -> None:
    needs = {"z": ["a", "a"], "b": ["a", "z"], "a": []}

    assert dependants(needs) == {"z": ("b",), "b": (), "a": ("z", "b")}


def test_a_circle_is_named_from_its_first_step_each_needing_the_next() -> None:
    needs = {"x": ["a"], "a": ["y", "b"], "y": [], "b": ["c"], "c": ["a"]}

    assert cycle(needs) == ("a", "b", "c")


def test_a_step_that_needs_itself_is_a_circle_of_one() -> None:
    assert cycle({"a": ["a"]}) == ("a",)


def test_two_ways_to_the_same_step_are_no_circle() -> None:
    assert cycle({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) is None


def test_names_that_are_no_steps_are_passed_over() -> None:
    assert cycle({"a": ["nobody"], "b": ["a", "nobody"]}) is None


def test_a_chain_of_thousands_is_no_deeper_than_a_short_one() -> None:
    length = 5_000
    chain = {node: [node + 1] for node in range(length)} | {length: []}

    assert cycle(chain) is None
    assert len(dependants(chain)) == length + 1
    assert cycle(chain | {length: [0]}) == tuple(range(length + 1))


def test_a_long_chain_has_all_its_ancestors() -> None:
    length = 1_500
    chain = {node: [node + 1] for node in range(length)} | {length: []}

    assert ancestors(chain)[0] == frozenset(range(1, length + 1))


@given(graphs(circles=False))
def test_ancestors_are_what_a_search_reaches(needs: Needs) -> None:
    assert ancestors(needs) == {node: reachable(needs, node) for node in needs}


@given(graphs(circles=False))
def test_dependants_are_needs_turned_round(needs: Needs) -> None:
    arrows = {(node, parent) for node, parents in needs.items() for parent in parents}
    turned = dependants(needs)

    assert {(child, node) for node, children in turned.items() for child in children} == arrows
    assert all(len(set(children)) == len(children) for children in turned.values())


@given(graphs(circles=True))
def test_a_circle_is_found_exactly_if_some_step_reaches_itself(needs: Needs) -> None:
    circle = cycle(needs)

    assert (circle is not None) == any(node in reachable(needs, node) for node in needs)
    if circle is not None:
        assert len(set(circle)) == len(circle)
        following = (*circle[1:], circle[0])
        assert all(then in needs[node] for node, then in zip(circle, following, strict=True))
