"""Going back and running again, and what both mixers owe to it: resuming, joined rows, chosen outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from raising import refused
from topograd.errors import StackError
from topograd.nn.mamba.mamba2 import Mamba2Mixer
from topograd.nn.mamba.mamba3 import Mamba3Mixer
from topograd.nn.mamba.recurrent import MAX_SNAPSHOTS, RecurrentState, last_columns
from topograd.nn.mkl_linear import packed

Mixer = Mamba2Mixer | Mamba3Mixer
NAMES = {Mamba2Mixer: ("columns", "S"), Mamba3Mixer: ("theta", "S", "B", "x")}


def value(position: int, rows: int = 1) -> dict[str, Tensor]:
    """What rows hold that have seen so many positions: 100 (row + 1) + position, or 0 at the start."""
    return {
        "S": torch.tensor([100.0 * (i + 1) + position if position else 0.0 for i in range(rows)])[:, None]
    }


def after(state: RecurrentState, time: int) -> None:
    state.advance(value(state.length + time, state.rows), time)


moves = st.one_of(
    st.tuples(st.just("advance"), st.integers(0, 3)),
    st.tuples(st.just("truncate"), st.integers(0, 12)),
    st.tuples(st.just("copy"), st.integers(0, 3)),
)


@given(st.lists(moves, max_size=25))
@settings(max_examples=50, deadline=None)
def test_a_state_holds_what_its_length_says_whatever_happens(steps: list[tuple[str, int]]) -> None:
    """Against all positions at which it stood; a copy goes on by itself."""
    state, stood = RecurrentState(value(0, 2)), [0]
    for kind, number in steps:
        if kind == "advance":
            after(state, number)
            stood.append(state.length)
        elif kind == "truncate":
            expected = max(length for length in stood if length <= number)
            assert state.truncate(number) == state.length == min(expected, stood[-1])
            stood = [length for length in stood if length <= state.length]
        else:
            left, state = state, state.copy()
            after(left, number)  # nothing of it may reach the copy
            left.truncate(0)
        assert torch.equal(state["S"], value(state.length, 2)["S"])


def test_it_goes_back_to_the_newest_snapshot() -> None:
    state = RecurrentState(value(0))
    for time in (4, 2, 1, 1):
        after(state, time)
    assert state.truncate(7) == 7
    assert state.truncate(5) == 4
    assert torch.equal(state["S"], value(4)["S"])
    assert state.truncate(3) == 0, "there is no snapshot before it"


def test_going_back_copies_nothing() -> None:
    state = RecurrentState(value(0, 2))
    after(state, 3)
    there = state["S"]
    after(state, 2)
    assert state.truncate(4) == 3
    assert state["S"] is there
    after(state, 1)
    assert state.truncate(9) == 4, "a length that is not reached changes nothing"


def test_only_the_newest_snapshots_are_kept() -> None:
    state = RecurrentState(value(0))
    for _ in range(MAX_SNAPSHOTS + 5):
        after(state, 1)
    assert state.truncate(5) == 5, "the oldest that is kept"
    assert state.truncate(4) == 0
    assert torch.equal(state["S"], torch.zeros(1, 1))


def test_going_back_again_and_again_does_not_use_up_the_snapshots() -> None:
    state = RecurrentState(value(0))
    for _ in range(3):
        after(state, 1)
    for _ in range(MAX_SNAPSHOTS + 5):
        after(state, 1)
        assert state.truncate(3) == 3
    assert state.truncate(1) == 1


def test_states_are_joined_for_a_run_and_take_their_rows_back() -> None:
    states = [RecurrentState(value(0)) for _ in range(3)]
    for state, time in zip(states, (2, 5, 0), strict=True):
        after(state, time)
    batch = RecurrentState.joined(states)
    assert batch.rows == 3
    assert batch["S"].tolist() == [[102.0], [105.0], [0.0]]
    batch.advance({"S": torch.tensor([[7.0], [8.0], [9.0]])}, 4)
    for row, state in enumerate(states):
        state.take(batch, row, 4)
    assert [state["S"].tolist() for state in states] == [[[7.0]], [[8.0]], [[9.0]]]
    assert [state.length for state in states] == [6, 9, 4]
    assert all(state["S"].untyped_storage().nbytes() == state["S"].nbytes for state in states)
    assert [state.truncate(5) for state in states] == [2, 5, 4]
    assert [state["S"].item() for state in states] == [102.0, 105.0, 9.0]


def test_what_a_state_refuses() -> None:
    with refused(StackError, setting="tensors"):
        RecurrentState({"S": torch.zeros(2, 1), "x": torch.zeros(3, 1)})
    state = RecurrentState(value(0, 2))
    with refused(StackError, setting="length", given=-1):
        state.truncate(-1)
    assert state.length == 0
    assert state.truncate(5) == 0


def test_the_last_columns() -> None:
    x = torch.arange(15).view(3, 5)  # two old columns and three new ones
    last = last_columns(x, 2)
    assert last.tolist() == [[3, 4], [8, 9], [13, 14]]
    assert last.untyped_storage().nbytes() == last.nbytes, "a view would keep all of x alive"


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
    assert ours.length == theirs.length


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
def test_joined_sequences_are_each_by_itself(kind: type[Mixer], time: int) -> None:
    """Sequences that have seen 3, 0, 2 and 1 positions take as many more, as one batch."""
    model = mixer(kind)
    prompt, u, first = inputs(4, 3), inputs(4, time) + 1, [3, 0, 2, 1]
    together, alone = ([model.new_state(1) for _ in range(4)] for _ in range(2))
    for states in (together, alone):
        for row, seen in enumerate(first):
            if seen:
                model(prompt[row : row + 1, :seen], states[row])
    batch = RecurrentState.joined(together)
    answers = model(u, batch)
    for row in range(4):
        together[row].take(batch, row, time)
        assert_same(answers[row : row + 1], model(u[row : row + 1], alone[row]))
        assert_same_state(together[row], alone[row], NAMES[kind])
        assert together[row].length == first[row] + time


@kinds
def test_a_sequence_that_is_not_in_a_batch_is_bit_for_bit_what_it_was(kind: type[Mixer]) -> None:
    model = mixer(kind, torch.float32)
    states = [model.new_state(1) for _ in range(3)]
    for row, state in enumerate(states):
        model(inputs(3, 5, torch.float32)[row : row + 1], state)
    before = [{name: state[name].clone() for name in NAMES[kind]} for state in states]
    for time in (1, 4):
        batch = RecurrentState.joined(states[1:])
        model(inputs(2, time, torch.float32), batch)
        for row, state in enumerate(states[1:]):
            state.take(batch, row, time)
    for name in NAMES[kind]:
        assert torch.equal(states[0][name], before[0][name])
        assert not torch.equal(states[1][name], before[1][name])
    assert [state.length for state in states] == [5, 10, 10]


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
def test_going_back_and_running_again(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 12)
    state = model.new_state(2)
    model(u[:, :5], state)
    for t in range(5, 8):
        model(u[:, t : t + 1], state)
    twin = state.copy()
    model(-u[:, 8:11], state)  # a guess of which nothing is kept
    whole = model.new_state(2)
    expected = model(u, whole)
    assert state.truncate(10) == 8
    assert_same(model(u[:, 8:], state), expected[:, 8:])
    assert twin.truncate(6) == 6, "a copy has the snapshots too"
    assert_same(model(u[:, 6:], twin), expected[:, 6:])
    assert_same_state(state, whole, NAMES[kind])
    assert_same_state(twin, whole, NAMES[kind])


@kinds
def test_steps_never_write_into_what_a_snapshot_holds(kind: type[Mixer]) -> None:
    model, u = mixer(kind), inputs(2, 6)
    state = model.new_state(2)
    model(u[:, :3], state)
    held = {name: (state[name], state[name].clone()) for name in NAMES[kind]}
    model(u[:, 3:4], state)
    model(u[:, 4:], state)
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
    with refused(StackError, setting="state", given=3):
        model(inputs(2, 4), model.new_state(3))


@kinds
@pytest.mark.parametrize(
    ("setting", "given"), [("width", 0), ("head_dim", 0), ("state", -1), ("chunk", 0), ("groups", 3)]
)
def test_sizes_are_checked(kind: type[Mixer], setting: str, given: int) -> None:
    with refused(StackError, setting=setting, given=given):
        kind(**{"width": 6, "heads": 4, "head_dim": 3, "state": 8, setting: given})


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
