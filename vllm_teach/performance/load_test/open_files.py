"""Each connection is an open file, and many systems let a process have no more than 1,024 unless it asks."""

from __future__ import annotations

from vllm_teach.errors import InvalidArgumentError

_OTHERS = 64  # files that a process has open besides: libraries, output, the event loop's own


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files so that `count` connections fit below it.

    Raises InvalidArgumentError where the system's own limit is lower. Does nothing on systems without such limits.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    needed = count + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InvalidArgumentError(
            f"{count} requests in flight need {needed} open files, and this system allows {hard}: ask for fewer "
            "(--concurrency, --max-in-flight), or raise the limit (ulimit -Hn)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
