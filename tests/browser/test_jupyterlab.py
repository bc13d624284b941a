"""A lesson in a real JupyterLab: every cell runs, and a key pressed on a slider changes the picture's bytes."""

import nbformat.v4 as v4
import pytest

from vllm_teach.teaching import notebooks

pytestmark = pytest.mark.browser

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}

SMALL = """
import matplotlib.pyplot as plt
from vllm_teach.teaching import explore, figure_png

def render(state):
    figure, axes = plt.subplots()
    axes.bar(range(8), [min(x, state["step"]) for x in range(8)])
    return figure_png(figure)

explore(render, readout=lambda state: f"step squared is {state['step'] ** 2}", step=range(8))
"""

KERNEL_IS_IDLE = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget;
    return panel?.sessionContext?.isReady && panel.sessionContext.session?.kernel?.status === 'idle';
}"""
# Every code cell: whether it ran, and the error it shows (unless its tags allow one).
CELLS = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .filter(cell => cell.model.type === 'code' && cell.model.sharedModel.getSource().trim())
    .map(cell => {
        const outputs = cell.model.outputs.toJSON();
        const allowed = (cell.model.getMetadata('tags') || []).includes('raises-exception');
        const error = outputs.find(output => output.output_type === 'error');
        return {ran: cell.model.executionCount !== null,
                error: error && !allowed ? error.ename + ': ' + error.evalue : null,
                widget: outputs.some(o => o.data && o.data['application/vnd.jupyter.widget-view+json'])};
    })"""
# The bytes behind an image's address, which is a new blob: address after every redraw, changed or not.
PICTURE = """async image => {
    const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer());
    const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
    return {length: bytes.length, digest: Array.from(digest).join(' '), width: image.naturalWidth};
}"""


def open_and_run(page, lab, name):
    """Open a notebook, clear it, run all cells, and return what each code cell did."""
    assert (lab.folder / name).is_file(), f"notebooks/{name} does not exist"
    page.goto(lab.page_of(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_function(KERNEL_IS_IDLE)
    # The committed outputs go first, so that none of them is taken for a fresh one.
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    assert not any(cell["ran"] for cell in page.evaluate(CELLS))
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(f"() => {{ const c = ({CELLS})(); return c.every(x => x.ran) || c.some(x => x.error) }}")
    page.wait_for_function(KERNEL_IS_IDLE)
    return page.evaluate(CELLS)


def explorers(page):
    """The rendered widgets of `explore`: a box with sliders, a readout and a picture."""
    boxes = page.locator(".jp-OutputArea-output .widget-vbox").filter(has=page.locator("img.widget-image"))
    boxes.first.wait_for()
    return boxes


def look_at(box):
    """(picture, readout) once the picture is drawn."""
    picture = box.locator("img.widget-image").first.evaluate(PICTURE)
    return picture, box.locator(":scope > .widget-label").inner_text()


def press(page, slider, key):
    """Press a key on the slider's handle; return when its own number has changed and the kernel is done."""
    number = slider.locator(".widget-readout")
    before = number.inner_text()
    handle = slider.locator(".noUi-handle").first
    handle.focus()
    handle.press(key)
    page.wait_for_function("([n, old]) => n.innerText !== old", arg=[number.element_handle(), before])
    page.wait_for_timeout(100)  # let the message leave before asking whether the kernel is busy with it
    page.wait_for_function(KERNEL_IS_IDLE)


def move_every_slider(page):
    """Step each slider to the right and back, and compare pictures and readouts; return how many sliders there were."""
    boxes, moved = explorers(page), 0
    for number in range(boxes.count()):
        box = boxes.nth(number)
        box.scroll_into_view_if_needed()
        sliders = box.locator(".widget-slider")
        for which in range(sliders.count()):
            at_rest = look_at(box)
            assert at_rest[0]["width"] > 0, "the picture is not drawn"
            press(page, sliders.nth(which), "ArrowRight")
            after = look_at(box)
            assert after[0]["digest"] != at_rest[0]["digest"], f"slider {which} of widget {number} changed no pixel"
            assert after[1] != at_rest[1], f"slider {which} of widget {number} left the readout at {at_rest[1]!r}"
            press(page, sliders.nth(which), "ArrowLeft")
            assert look_at(box) == at_rest, "back at the first setting the widget shows something else"
            moved += 1
    return moved


def assert_all_ran(cells):
    assert cells
    assert [cell["error"] for cell in cells if cell["error"]] == []
    assert all(cell["ran"] for cell in cells)


def save(lab, name, source):
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source.strip())], metadata={"kernelspec": KERNEL})
    (lab.folder / name).write_text(notebooks.to_text(notebook))


def test_a_small_widget(lab, page):
    save(lab, "small.ipynb", SMALL)
    assert_all_ran(open_and_run(page, lab, "small.ipynb"))
    assert look_at(explorers(page).first)[1] == "step squared is 0"
    assert move_every_slider(page) == 1


def test_a_picture_that_stays_the_same_would_be_noticed(lab, page):
    assert 'state["step"]' in SMALL
    save(lab, "still.ipynb", SMALL.replace('state["step"]', "4"))
    open_and_run(page, lab, "still.ipynb")
    with pytest.raises(AssertionError, match="changed no pixel"):
        move_every_slider(page)


def test_lesson_02(lab, page):
    cells = open_and_run(page, lab, "02_online_softmax_and_tiling.ipynb")
    assert_all_ran(cells)
    assert move_every_slider(page) >= sum(cell["widget"] for cell in cells) >= 1
