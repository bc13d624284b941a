"""The canonical form keeps what matters, drops what differs between two machines, and is its own canonical form."""

import base64
import copy
import io
import re
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat.v4 as v4
import numpy as np
import pytest

from vllm_teach.teaching import canonical


def picture(metadata: dict[str, str | None]) -> bytes:
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([0, 1])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata=metadata)
    plt.close(figure)
    return buffer.getvalue()


def messy_notebook():
    """What JupyterLab might save: random ids, counts with gaps, widget views, timestamps, versions."""
    widget = v4.new_output(
        "execute_result",
        {canonical.WIDGET_VIEW: {"model_id": "5f0c"}, "text/plain": "Slider at 0x7f3a12345678: 3"},
        execution_count=17,
    )
    streams = [v4.new_output("stream", name="stdout", text=text) for text in ("one\n", "two\n")]
    image = v4.new_output(
        "display_data",
        {"image/png": base64.encodebytes(picture({"Software": "matplotlib 9.9"})).decode(), "text/plain": "<Figure>"},
        metadata={"needs_background": "light"},
    )
    code = v4.new_code_cell("print(1)\n", outputs=[*streams, widget, image], execution_count=17)
    code.metadata = {"tags": ["a"], "execution": {"iopub.status.busy": "2024-01-01T00:00:00Z"}, "scrolled": True}
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), code, v4.new_code_cell("x = 1")])
    notebook.metadata = {
        "kernelspec": {"name": "my-env", "display_name": "Mine", "language": "python"},
        "language_info": {"name": "python", "version": "3.11.2"},
        "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {}}},
    }
    return notebook


def test_counts_ids_tags_and_metadata():
    cells = canonical.canonicalise(messy_notebook()).cells
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2]
    assert cells[1].outputs[1].execution_count == 1
    assert cells[1].metadata == {"tags": ["a"]}
    assert len({cell.id for cell in cells}) == 3


def test_widget_state_views_versions_and_dates_are_gone():
    text = str(canonical.canonicalise(messy_notebook()))
    for trace in ("widget", "3.11.2", "my-env", "2024-01-01", "scrolled", "5f0c", "0x7f3a12345678", "needs_background"):
        assert trace not in text
    assert "Slider at 0x000000000000: 3" in text


def test_streams_are_joined_and_other_outputs_stay_between_them():
    first = v4.new_output("stream", name="stdout", text="a")
    value = v4.new_output("execute_result", {"text/plain": "1"}, execution_count=1)
    joined = canonical.merge_streams([first, first, value, first])
    assert [o.get("text") for o in joined] == ["aa", None, "a"]
    assert first.text == "a"


def test_the_argument_is_not_changed_and_the_form_is_stable():
    messy = messy_notebook()
    before = copy.deepcopy(messy)
    once = canonical.canonicalise(messy)
    assert messy == before
    assert canonical.canonicalise(once) == once


def test_ids_follow_the_text_so_an_insertion_renames_nothing():
    cells = [v4.new_markdown_cell("a"), v4.new_code_cell("a"), v4.new_code_cell("a")]
    ids = canonical.cell_ids(cells)
    assert len(set(ids)) == 3
    assert canonical.cell_ids([v4.new_markdown_cell("new"), *cells])[1:] == ids
    assert all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", identity) for identity in ids)  # nbformat's rule


def test_pictures_of_two_matplotlib_versions_become_the_same_and_keep_their_pixels():
    old, new = picture({"Software": "matplotlib 3.9"}), picture({"Software": "matplotlib 4.0", "Author": "me"})
    assert old != new
    stripped = canonical.strip_png_text(old)
    assert stripped == canonical.strip_png_text(new) == canonical.strip_png_text(stripped)
    assert np.array_equal(plt.imread(io.BytesIO(stripped)), plt.imread(io.BytesIO(old)))


def test_damaged_pictures_are_refused():
    with pytest.raises(ValueError, match="signature"):
        canonical.strip_png_text(b"GIF89a")
    damaged = bytearray(picture({}))
    damaged[40] ^= 255
    with pytest.raises(ValueError, match="damaged"):
        canonical.strip_png_text(bytes(damaged))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("saved to /home/ada/out.png", ["/home/ada/out.png"]),
        ("File '/tmp/tmpab12/x.py', line 1", ["/tmp/tmpab12/x.py"]),
        (r"in C:\Users\ada\x.py", [r"C:\Users\ada\x.py"]),
        ("POST /v1/completions, 3 tokens/s, https://example.org/home/x, 1/2", []),
    ],
)
def test_absolute_paths(text, found):
    assert canonical.absolute_paths(text) == found


def test_numbers_survive_the_scrubbing():
    text = "0x1F 0xFFFF 4096 1e-12 0.123456789 deadbeefdeadbeef"
    assert canonical.scrub_addresses(text) == text
    assert canonical.scrub_addresses("<f at 0x7F00AA10>") == "<f at 0x000000000000>"


def test_nbval_is_told_the_same_pattern_and_no_other():
    config = (Path(__file__).parents[1] / "sanitize.cfg").read_text()
    assert re.findall(r"^regex: (.*)$\n^replace: (.*)$", config, re.MULTILINE) == [
        (canonical.ADDRESS.pattern, canonical.SCRUBBED_ADDRESS)
    ]
