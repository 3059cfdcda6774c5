import matplotlib
import numpy as np
import pytest

from topograd.report.drawing import (
    BACKPROP,
    MAX_POINTS,
    MAX_TEXTS,
    NARROW,
    WIDTH,
    Bar,
    Drawing,
    bars,
    legend_below,
    look,
    new_figure,
    panels,
    render,
    style,
    thin,
)


@pytest.mark.parametrize("stages", [1, 3, 6, 7, 24])
def test_every_stage_has_its_own_colour(stages: int) -> None:
    colours = [look(k, stages).colour for k in range(stages)]
    assert len({*colours, BACKPROP}) == stages + 1


def test_a_stage_keeps_its_look_while_stages_are_few() -> None:
    assert look(1, 2) == look(1, 6)


def test_style_ignores_the_users_settings_and_puts_them_back() -> None:
    with matplotlib.rc_context({"axes.facecolor": "red", "svg.hashsalt": "theirs"}):
        with style():
            assert matplotlib.rcParams["axes.facecolor"] == "white"
            assert matplotlib.rcParams["svg.hashsalt"] == "topograd"
        assert matplotlib.rcParams["axes.facecolor"] == "red"
        assert matplotlib.rcParams["svg.hashsalt"] == "theirs"


def test_rendering_is_deterministic_and_nameless() -> None:
    def draw() -> Drawing:
        with style():
            figure = new_figure(1.5)
            axes = panels(figure, 1)[0]
            axes.plot([1, 2], [3, 4], marker="o")
            return render(figure)

    svg, png, narrow = draw()
    assert (svg, png, narrow) == draw()
    for text in (svg, narrow):
        assert "<svg" in text
        assert "atplotlib v" not in text
        assert "date" not in text.lower()
    assert png.startswith(b"\x89PNG")
    assert b"Software" not in png


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS - 3])
def test_thin_keeps_the_last_point(count: int) -> None:
    steps = np.arange(float(count))
    few, values = thin(steps, steps * 2)
    assert len(few) <= MAX_POINTS
    assert len(few) > 0.45 * min(count, MAX_POINTS) or count == 0
    np.testing.assert_array_equal(values, few * 2)
    np.testing.assert_array_equal(few[-1:], steps[-1:])


def test_bars_start_at_zero_and_have_room_for_texts() -> None:
    with style():
        axes = panels(new_figure(2), 1)[0]
        bars(axes, [Bar("a", 3.0, "#000000", "3"), Bar("b", -1.0, "#000000", "−1")], slots=4)
        low, high = axes.get_ylim()
        assert low < -1
        assert high > 3
        bars(panels(new_figure(2), 1)[0], [Bar("a", 0.0, "#000000", "0")], slots=4)
        positive = panels(new_figure(2), 1)[0]
        bars(positive, [Bar("a", 3.0, "#000000", "3")], slots=4)
        assert positive.get_ylim()[0] == 0


def test_many_bars_lose_their_texts_but_name_their_ends() -> None:
    with style():
        axes = panels(new_figure(2), 1)[0]
        bars(axes, [Bar(str(k), 1.0, "#000000", "text") for k in range(3 * MAX_TEXTS)], slots=4)
        labels = [label.get_text() for label in axes.get_xticklabels()]
    assert not axes.texts
    assert len(labels) <= MAX_TEXTS + 1
    assert (labels[0], labels[-1]) == ("0", str(3 * MAX_TEXTS - 1))


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 1), (4, 2)])
def test_the_narrow_layout_stacks_axes_and_cuts_nothing(count: int, columns: int) -> None:
    with style():
        figure = new_figure(3.2)
        axes = panels(figure, count, sharey=True)
        for place, each in enumerate(axes):
            each.plot([1, 2], [3, 4], label=f"a line with a long name, {place}")
            each.plot([1, 2], [4, 3], label="another one")
            each.set(xlabel="a label that would not fit the width of a phone in one line", title="a title")
        legend_below(figure, axes[0])
        drawing = render(figure)
        corners = {(round(each.get_position().x0, 3), round(each.get_position().y0, 3)) for each in axes}
        page = figure.get_window_extent()
        boxes = [each.get_tightbbox() for each in (*axes, *figure.legends)]
    assert figure.get_figwidth() == NARROW
    assert f'width="{WIDTH * 72:g}pt"' in drawing.svg
    assert f'width="{NARROW * 72:g}pt"' in drawing.narrow
    assert len({left for left, _ in corners}) == columns
    assert len({bottom for _, bottom in corners}) == -(-count // columns)
    for box in boxes:
        assert box is not None
        assert page.x0 <= box.x0 < box.x1 <= page.x1
        assert page.y0 <= box.y0 < box.y1 <= page.y1
