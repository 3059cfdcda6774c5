"""Going back and replaying, and what both mixers owe to it: resuming, padded rows, chosen outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from topograd.errors import StackError
from topograd.nn.mamba.mamba2 import Mamba2Mixer
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.nn.mamba.recurrent import KEPT, RecurrentState, last_columns, real_columns
from topograd.nn.packed import packed

Mixer = Mamba2Mixer | Mamba3Mixer
NAMES = {Mamba2Mixer: ("columns", "S"), Mamba3Mixer: ("theta", "S", "B", "x")}


def value(rows: list[int]) -> dict[str, Tensor]:
    """What a row holds that has seen so many positions: 100 (row + 1) + position, or 0 at the start."""
    return {"S": torch.tensor([100.0 * (i + 1) + t if t else 0.0 for i, t in enumerate(rows)])[:, None]}


def after(state: RecurrentState, counts: list[int]) -> None:
    state.advance(
        value([m + c for m, c in zip(state.marks, counts, strict=True)]), counts, max(counts, default=0)
    )


moves = st.one_of(
    st.tuples(st.just("advance"), st.lists(st.integers(0, 3), min_size=3, max_size=3)),
    st.tuples(st.just("rewind"), st.lists(st.integers(0, 12), min_size=3, max_size=3)),
)


@given(st.lists(moves, max_size=25))
@settings(max_examples=25, deadline=None)
def test_rows_hold_what_their_marks_say_whatever_happens(steps: list[tuple[str, list[int]]]) -> None:
    state = RecurrentState(value([0, 0, 0]), 3)
    for kind, numbers in steps:
        before = state.marks
        if kind == "advance":
            after(state, numbers)
        else:
            here = state.rewind(numbers)
            assert here == state.marks
            assert all(now <= min(mark, was) for now, mark, was in zip(here, numbers, before, strict=True))
            assert all(
                now == was for now, mark, was in zip(here, numbers, before, strict=True) if was <= mark
            )
        assert torch.equal(state["S"], value(state.marks)["S"])


def test_each_row_goes_back_to_its_newest_snapshot() -> None:
    state = RecurrentState(value([0, 0, 0]), 3)
    for counts in ([4, 4, 4], [2, 0, 3], [1, 1, 1], [1, 1, 1]):  # 4 4 4 | 6 4 7 | 7 5 8 | 8 6 9
        after(state, counts)
    assert state.rewind([6, 5, 8]) == [6, 5, 8]
    assert torch.equal(state["S"], value([6, 5, 8])["S"])
    assert state.rewind([6, 4, 9]) == [6, 4, 8], "the snapshot 6 4 7 is earlier in every row"
    assert state.rewind([5, 3, 8]) == [4, 0, 8], "the second row has no snapshot before its mark"
    assert state.rewind([4, 4, 7]) == [4, 0, 0], "snapshots beyond any row were dropped"


def test_going_back_for_all_rows_alike_copies_nothing() -> None:
    state = RecurrentState(value([0, 0]), 2)
    after(state, [3, 3])
    there = state["S"]
    after(state, [2, 2])
    assert state.rewind([4, 4]) == [3, 3]
    assert state["S"] is there
    after(state, [1, 1])
    assert state.rewind([9, 9]) == [4, 4], "a mark that is not reached changes nothing"


def test_only_the_newest_snapshots_are_kept() -> None:
    state = RecurrentState(value([0]), 1)
    for _ in range(KEPT + 5):
        after(state, [1])
    assert state.rewind([5]) == [5], "the oldest that is kept"
    assert state.rewind([4]) == [0]
    assert torch.equal(state["S"], torch.zeros(1, 1))


def test_going_back_again_and_again_does_not_use_up_the_snapshots() -> None:
    state = RecurrentState(value([0]), 1)
    for _ in range(3):
        after(state, [1])
    for _ in range(KEPT + 5):
        after(state, [1])
        assert state.rewind([3]) == [3]
    assert state.rewind([1]) == [1]


def test_what_a_state_refuses() -> None:
    state = RecurrentState(value([0, 0]), 2)
    with pytest.raises(StackError, match="S has 2 rows and the state 3"):
        RecurrentState(value([0, 0]), 3)
    with pytest.raises(StackError, match=r"counts are \[1, 4\] for 2 rows; .* 0 to 3"):
        state.advance(value([1, 4]), torch.tensor([1, 4]), 3)
    with pytest.raises(StackError, match=r"counts are \[1\] for 2 rows"):
        state.advance(value([1, 1]), [1], 3)
    with pytest.raises(StackError, match=r"marks are \[0\] for 2 rows"):
        state.rewind([0])
    with pytest.raises(StackError, match=r"marks are \[0, -1\]"):
        state.rewind([0, -1])
    assert state.marks == [0, 0]
    assert state.rewind([5, 5]) == [0, 0]


def test_columns_of_rows() -> None:
    counts = torch.tensor([0, 3, 2])
    assert real_columns(counts, 3).tolist() == [[False] * 3, [True] * 3, [True, True, False]]
    x = torch.arange(15).view(3, 5)  # two old columns and three new ones
    assert last_columns(x, counts, 2).tolist() == [[0, 1], [8, 9], [12, 13]]
    assert last_columns(x, None, 2).tolist() == [[3, 4], [8, 9], [13, 14]]


# What both mixers owe.


def mixer(kind: type[Mixer], dtype: torch.dtype = torch.float64) -> Mixer:
    torch.manual_seed(1)
    made = kind(6, 4, 3, 8, groups=2, chunk=4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.to(dtype)


def inputs(batch: int, time: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, time, 6, dtype=dtype, generator=torch.Generator().manual_seed(2))


def assert_same(ours: Tensor, theirs: Tensor, bound: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def assert_same_state(ours: RecurrentState, theirs: RecurrentState, names: tuple[str, ...]) -> None:
    for name in names:
        left, right = ours[name], theirs[name]
        if name == "theta":  # 0 and 2π are the same angle
            left, right = (torch.cat((angle.cos(), angle.sin()), -1) for angle in (left, right))
        assert_same(left, right)
    assert ours.marks == theirs.marks


kinds = pytest.mark.parametrize("kind", [Mamba2Mixer, Mamba3Mixer], ids=["mamba2", "mamba3"])


@kinds
@given(time=st.integers(1, 14), cuts=st.lists(st.integers(1, 13), max_size=13))
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_outputs_and_state(kind: type[Mixer], time: int, cuts: list[int]) -> None:
    model, u = mixer(kind), inputs(2, time)
    whole, state = model.new_state(2), model.new_state(2)
    expected = model(u, whole)
    assert_same(model(u), expected)
    ends = sorted({cut for cut in cuts if cut < time} | {time})
    pieces = [model(u[:, begin:end], state) for begin, end in zip([0, *ends], ends, strict=False)]
    assert_same(torch.cat(pieces, 1), expected)
    assert_same_state(state, whole, NAMES[kind])


@kinds
def test_gradients_go_through_resumed_states(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 9).requires_grad_()
    wanted = [u, *model.parameters()]
    state = model.new_state(2)
    pieces = [model(u[:, :4], state), model(u[:, 4:5], state), model(u[:, 5:], state)]
    weight = torch.randn(2, 9, 6, dtype=u.dtype)
    ours = torch.autograd.grad(torch.cat(pieces, 1), wanted, weight)
    theirs = torch.autograd.grad(model(u), wanted, weight)
    for left, right in zip(ours, theirs, strict=True):
        assert (left - right).norm() <= 1e-12 * right.norm()


@kinds
@pytest.mark.parametrize("time", [1, 2, 6])
def test_padding_changes_neither_state_nor_outputs(kind: type[Mixer], time: int) -> None:
    model = mixer(kind)
    counts = torch.tensor([0, 1, time, time // 2])
    prompt, u = inputs(4, 3), inputs(4, time) + 1
    together = model.new_state(4)
    model(prompt, together, torch.tensor([3, 0, 2, 1]))
    padded = torch.where(real_columns(counts, time)[..., None], u, 1e3)
    answers = model(padded, together, counts)
    for row, count in enumerate(counts.tolist()):
        alone, first = model.new_state(1), [3, 0, 2, 1][row]
        if first:
            model(prompt[row : row + 1, :first], alone)
        if count:
            assert_same(answers[row : row + 1, :count], model(u[row : row + 1, :count], alone))
        assert together.marks[row] == alone.marks[0]
        for name in NAMES[kind]:
            left, right = together[name][row : row + 1], alone[name]
            assert_same(left.cos() if name == "theta" else left, right.cos() if name == "theta" else right)


@kinds
def test_a_row_that_sees_nothing_is_bit_for_bit_what_it_was(kind: type[Mixer]) -> None:
    model = mixer(kind, torch.float32)
    state = model.new_state(2)
    model(inputs(2, 5, torch.float32), state)
    before = {name: state[name] for name in NAMES[kind]}
    for time in (1, 4):
        model(inputs(2, time, torch.float32), state, torch.tensor([0, time]))
    for name, tensor in before.items():
        assert torch.equal(state[name][0], tensor[0])
        assert not torch.equal(state[name][1], tensor[1])
    assert state.marks == [5, 10]


@kinds
def test_chosen_rows_are_those_of_the_whole(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 7)
    rows = torch.tensor([6, 0, 3])
    seen: list[torch.Size] = []
    model.out_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    state, whole = model.new_state(2), model.new_state(2)
    assert_same(model(u, state, rows=rows), model(u, whole)[:, rows])
    assert_same(model(u, rows=rows), model(u)[:, rows])
    assert [shape[1] for shape in seen] == [3, 7, 3, 7], "the output matrix sees the rows only"
    assert_same_state(state, whole, NAMES[kind])


@kinds
def test_rewind_and_replay(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 12)
    state = model.new_state(2)
    model(u[:, :5], state)
    for t in range(5, 8):
        model(u[:, t : t + 1], state)
    model(-u[:, 8:11], state)  # a guess, of which one row keeps nothing and the other goes back further
    here = state.rewind([8, 6])
    assert here == [8, 6]
    counts = torch.tensor([12 - mark for mark in here])
    rest = torch.stack([torch.nn.functional.pad(u[row, m:], (0, 0, 0, m - 6)) for row, m in enumerate(here)])
    answers = model(rest, state, counts)
    whole = model.new_state(2)
    expected = model(u, whole)
    for row, mark in enumerate(here):
        assert_same(answers[row, : 12 - mark], expected[row, mark:])
    assert_same_state(state, whole, NAMES[kind])


@kinds
def test_steps_never_write_into_what_a_snapshot_holds(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 6)
    state = model.new_state(2)
    model(u[:, :3], state)
    held = {name: (state[name], state[name].clone()) for name in NAMES[kind]}
    model(u[:, 3:4], state)
    model(u[:, 4:], state, torch.tensor([1, 2]))
    assert all(torch.equal(*pair) for pair in held.values())


@kinds
def test_the_state_holds_no_more_memory_than_itself(kind: type[Mixer]) -> None:
    model = mixer(kind)
    state = model.new_state(2)
    model(inputs(2, 50), state)
    for name in NAMES[kind]:
        assert state[name].untyped_storage().nbytes() == state[name].nbytes


@kinds
def test_bfloat16_keeps_its_recurrence_in_float32(kind: type[Mixer]) -> None:
    exact, low = mixer(kind), mixer(kind, torch.bfloat16)
    u = inputs(2, 20)
    state = low.new_state(2)
    first, second = low(u[:, :19].bfloat16(), state), low(u[:, 19:].bfloat16(), state)
    assert first.dtype == second.dtype == torch.bfloat16
    assert state["S"].dtype == torch.float32
    answer, expected = torch.cat((first, second), 1).double(), exact(u)
    assert (answer - expected).norm() < 0.03 * expected.norm()  # bfloat16 has 8 bits: 2⁻⁸ per rounding


@kinds
def test_autocast_keeps_the_state_in_float32(kind: type[Mixer]) -> None:
    model, u = mixer(kind, torch.float32), inputs(2, 9, torch.float32)
    state = model.new_state(2)
    expected = model(u)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pieces = [model(u[:, :8], state), model(u[:, 8:], state)]
    assert state["S"].dtype == torch.float32
    assert (torch.cat(pieces, 1).float() - expected).norm() < 0.03 * expected.norm()


@kinds
def test_a_state_of_other_rows_is_refused(kind: type[Mixer]) -> None:
    model = mixer(kind)
    with pytest.raises(
        StackError, match=r"the input has 2 rows and the state 3; make one with new_state\(2\)"
    ):
        model(inputs(2, 4), model.new_state(3))


@kinds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"state": -1}, "state is -1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"groups": 3}, "4 heads cannot share 3 groups; use a divisor"),
    ],
)
def test_sizes_are_checked(kind: type[Mixer], change: dict[str, int], message: str) -> None:
    with pytest.raises(StackError, match=message):
        kind(**{"width": 6, "heads": 4, "head_dim": 3, "state": 8, **change})


@kinds
def test_a_packed_copy_decodes_the_same(kind: type[Mixer]) -> None:
    model = mixer(kind, torch.float32)
    twin, u = packed(model), inputs(2, 5, torch.float32)
    state = twin.new_state(2)
    with torch.no_grad():
        steps = [twin(u[:, t : t + 1], state) for t in range(5)]
        torch.testing.assert_close(torch.cat(steps, 1), model(u), rtol=1e-5, atol=1e-5)


@kinds
def test_transforms_of_the_whole_mixer(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 7)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, (x,)).square().sum()

    whole = grad(loss)(parameters, u)
    along = jvp(lambda values: loss(values, u), (parameters,), (tangents,))[1]
    torch.testing.assert_close(
        along, sum((whole[n] * tangents[n]).sum() for n in whole), rtol=1e-11, atol=1e-11
    )
    each = vmap(lambda x: grad(loss)(parameters, x[None]))(u)
    curved = jvp(lambda values: grad(loss)(values, u), (parameters,), (tangents,))[1]
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    first = torch.autograd.grad(loss(leaves, u), list(leaves.values()), create_graph=True)
    twice = torch.autograd.grad(first, list(leaves.values()), list(tangents.values()))
    for name, second in zip(parameters, twice, strict=True):
        assert_same(each[name].sum(0), whole[name])
        assert_same(curved[name], second, 1e-11)  # products of sums that cancel
