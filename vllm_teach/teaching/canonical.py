"""The canonical form of a committed notebook: what stays the same when nothing that matters changed.

Pure functions on nbformat's nodes. `notebooks.py` executes and writes; nothing here does.
"""

import base64
import copy
import hashlib
import re
import struct
import zlib
from typing import Any

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

# No version numbers: a notebook must not change because a maintainer's Python did.
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}

SCRUBBED_ADDRESS = "0x000000000000"
# The same pattern stands in tests/sanitize.cfg. Eight digits at least: hexadecimal numbers a lesson prints are shorter.
ADDRESS = re.compile(r"0x[0-9a-fA-F]{8,16}\b")

_ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|Users|root|tmp|private|var|usr|opt|mnt|srv|work|workspace|builds|runner)/[^\s'\",)]+"
    r"|\b[A-Za-z]:\\[^\s'\",)]+"
)
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_DROPPED = {b"tEXt", b"iTXt", b"zTXt", b"tIME", b"eXIf"}


def canonicalise(notebook: Any) -> Any:
    """Return a canonical copy of an nbformat 4 notebook; the argument is not changed.

    Execution counts run 1, 2, 3… over the code cells; ids follow from the cells' text; of the metadata only the cells'
    tags stay; widget views and state go (their picture and text stay); pictures lose their text chunks; addresses
    become zeros.
    """
    result = copy.deepcopy(notebook)
    result.nbformat, result.nbformat_minor = 4, 5
    result.metadata = type(result.metadata)(copy.deepcopy(NOTEBOOK_METADATA))
    count = 0
    for cell, identity in zip(result.cells, cell_ids(result.cells), strict=True):
        cell.id = identity
        cell.source = cell.source.strip("\n")
        tags = list(dict.fromkeys(cell.metadata.get("tags", [])))
        cell.metadata = type(cell.metadata)({"tags": tags} if tags else {})
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [_canonical_output(output, count) for output in merge_streams(cell.outputs)]
    return result


def cell_ids(cells: list[Any]) -> list[str]:
    """Ids that depend on a cell's kind and text only, so that inserting one cell does not rename the others."""
    seen: dict[str, int] = {}
    ids = []
    for cell in cells:
        text = f"{cell.cell_type}\n" + cell.source.strip("\n")
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def merge_streams(outputs: list[Any]) -> list[Any]:
    """Join neighbouring outputs of one stream: how a print is cut into messages depends on timing."""
    merged: list[Any] = []
    for output in outputs:
        previous = merged[-1] if merged else None
        if (
            output.output_type == "stream"
            and previous is not None
            and previous.output_type == "stream"
            and previous.name == output.name
        ):
            previous.text += output.text
        else:
            merged.append(copy.deepcopy(output))
    return merged


def _canonical_output(output: Any, count: int) -> Any:
    if output.output_type == "stream":
        output.text = scrub_addresses(output.text)
    elif output.output_type == "error":
        output.evalue = scrub_addresses(output.evalue)
        output.traceback = []  # full of paths and colours, and nbval does not compare it
    else:
        output.metadata = type(output.metadata)({})
        output.data.pop(WIDGET_VIEW, None)
        for kind, value in output.data.items():
            if kind == "image/png":
                output.data[kind] = base64.b64encode(strip_png_text(base64.b64decode(value))).decode()
            elif isinstance(value, str):
                output.data[kind] = scrub_addresses(value)
        if output.output_type == "execute_result":
            output.execution_count = count
    return output


def scrub_addresses(text: str) -> str:
    """Replace memory addresses (`<object at 0x7f…>`) by zeros."""
    return ADDRESS.sub(SCRUBBED_ADDRESS, text)


def strip_png_text(png: bytes) -> bytes:
    """Drop a PNG's text, time and Exif chunks: matplotlib writes its own version there. The pixels stay."""
    if not png.startswith(_PNG_SIGNATURE):
        raise ValueError("The bytes do not start with PNG's signature.")
    kept, at = [_PNG_SIGNATURE], len(_PNG_SIGNATURE)
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, end = png[at + 4 : at + 8], at + 12 + length
        (stored,) = struct.unpack(">I", png[end - 4 : end])
        if stored != zlib.crc32(png[at + 4 : end - 4]):
            raise ValueError(f"The PNG chunk {kind!r} at byte {at} is damaged.")
        if kind not in _PNG_DROPPED:
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


def absolute_paths(text: str) -> list[str]:
    """Paths in `text` that exist on one machine only (below /home, /tmp, C:\\ and the like)."""
    return _ABSOLUTE_PATH.findall(text)


def output_texts(cell: Any) -> list[str]:
    """Every text a code cell shows: its streams, its non-picture data, its error's message."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append(output.evalue)
        else:
            texts += [v for k, v in output.data.items() if isinstance(v, str) and not k.startswith("image/")]
    return texts
