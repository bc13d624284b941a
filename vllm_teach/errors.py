"""The package's typed errors: each message is one sentence that names the argument, its value and what to do."""


class VllmTeachError(Exception):
    """Base of every error that the package raises on purpose."""


class InvalidArgumentError(VllmTeachError, ValueError):
    """An argument that can never work; the message names it, its value and the values that do."""


class PromptTooLongError(InvalidArgumentError):
    """A prompt (with the tokens asked for) that does not fit the model's context or the KV cache."""


class ModelNotFoundError(VllmTeachError, FileNotFoundError):
    """No model is where the caller pointed."""


class ResourceNotFoundError(VllmTeachError, FileNotFoundError):
    """A file that should travel with the package, a table or a kernel source, is not there under this name."""


class ModelLoadError(VllmTeachError):
    """A model is there, but broken, incomplete or of an architecture the package does not know."""


class DownloadError(VllmTeachError):
    """A download failed, or brought other bytes than the ones whose checksum is known."""


class CacheError(VllmTeachError):
    """The folder for models, which VLLM_TEACH_HOME names, cannot be read or written, or is full."""


class MissingDependencyError(VllmTeachError, ImportError):
    """An optional library is needed and absent; the message says what to install."""


class EngineError(VllmTeachError):
    """A request failed inside the engine; the request's neighbours go on."""


class OutOfMemoryError(EngineError):
    """A step found no memory for what it computes, on the device or the host."""


class EngineDeadError(EngineError):
    """The engine's loop, its process or one of its workers has ended or hangs: nothing more comes from it."""


class QueueFullError(VllmTeachError):
    """So many requests wait already that one more is refused; a later one may be taken."""


class RequestTimeoutError(VllmTeachError, TimeoutError):
    """A request waited, or ran, longer than it may; it has been aborted."""


class ReplicaError(VllmTeachError):
    """A replica, or the nginx before the replicas, cannot be started or keeps going down."""


def installs(extra: str) -> str:
    """Return, for a message, what installs an extra of the package, which no registry has, but a clone does."""
    return f'pip install -e ".[{extra}]" in the clone'
