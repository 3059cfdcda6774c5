"""`python -m papers check costs`: the published table, its flags, and what it refuses."""

from typing import Any

import pytest

from calls import shown
from papers.latent_bounded_interfaces.check_costs import Costs, costs_table


def test_the_published_costs(call: Any) -> None:
    """Table 4 of the source, and what it leaves out, at the configuration of its Appendix B."""
    answer = call("check", "costs", "--json").json
    assert (answer["rank"], answer["regions"], answer["ops_per_byte"]) == (64, 16, 295)
    for name, published in (("ssm", (7.8, 125, 500)), ("transformer", (80, 1275, 5100))):
        assert list(answer[name]["jacobian_intensity"].values()) == pytest.approx(published, rel=6e-3)
    assert [answer[name]["least_chunk"] for name in ("ssm", "transformer")] == [64, 4]
    assert [answer[name]["published_least_chunk"] for name in ("ssm", "transformer")] == [38, 4]
    assert answer["ssm"]["transport"]["LBI scan"]["span"] == 4 * 64**3


def test_the_costs_follow_the_flags(call: Any) -> None:
    words = "--batch 2 --tokens 4 --width 8 --state 4 --heads 2 --mlp-width 16 --rank 3 --regions 2"
    answer = call("check", "costs", *words.split(), "--ops-per-byte", 1, "--json").json
    assert answer["ssm"]["forward_flops"] == 2 * 4 * 8 * 4
    assert answer["transformer"]["forward_bytes"] == 2 * 2 * 4 * (8 + 2 * 4 + 16)
    assert list(answer["ssm"]["jacobian_intensity"]) == ["1", "3"]
    assert answer["ssm"]["work"] == 2 * (3 * 256 + 27 + 256)


def test_the_costs_table_fits_a_terminal() -> None:
    table = shown(costs_table(Costs().answer()))
    assert "K = 16 regions, r = 64" in table
    assert "│ bound by compute (295 per byte) from chunk │        64 │           4 │" in table
    assert "│   published, passes not whole              │        38 │           4 │" in table
    assert "…" not in table
    none = shown(costs_table(Costs(rank=16).answer()))
    assert "│ bound by compute (295 per byte) from chunk │         – │" in none


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--rank 0", "--rank is 0; it must be at least 1"),
        ("--state -3", "--state is -3; it must be at least 1"),
        ("--ops-per-byte 0", "--ops-per-byte is 0.0; it must be at least"),
        *((f"--batch {value}", "--batch") for value in ("99999999999999999999", 10**12, "nan", 0)),
        *((f"--ops-per-byte {value}", "--ops-per-byte") for value in ("inf", "nan", "1e400", -1)),
    ],
)
def test_bad_input_is_one_line(words: str, why: str, call: Any) -> None:
    assert why in call("check", "costs", *words.split()).refusal
