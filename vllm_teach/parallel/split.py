"""Who gets which part of something that is divided."""

from vllm_teach.errors import InvalidArgumentError


def split(total: int, parts: int, unit: int = 1) -> list[range]:
    """Divide 0 … `total` - 1 into `parts` runs of whole units, as even as can be, the larger ones first.

    A last unit may be incomplete. Raises InvalidArgumentError when there are fewer units than parts.
    """
    units = -(-total // unit)
    if units < parts:
        raise InvalidArgumentError(f"total={total} has {units} units of {unit}, too few for {parts} parts: use fewer.")
    each, more = divmod(units, parts)
    ends = [min(total, unit * (each * part + min(part, more))) for part in range(parts + 1)]
    return [range(ends[part], ends[part + 1]) for part in range(parts)]
