"""Every failure that Forerun raises on purpose.

Each message says what is wrong, what was expected and what to do. All derive from `ForerunError`, so that one
`except` catches what the library refuses and nothing else; the subclasses also derive from the built-in that
a caller would expect (`ValueError`, `OSError`, ...).
"""


class ForerunError(Exception):
    """Base of all errors raised by Forerun."""


class InvalidRequestError(ForerunError, ValueError):
    """A request or one of its parameters can't be served as given (range, type, token id, length)."""


class InvalidConstraintError(InvalidRequestError):
    """A constraint can't be compiled: malformed, unsupported, unsatisfiable, too large or too slow.

    Attributes:
        keyword: the schema keyword at fault, or None.
        path: where it stands in the schema, as a JSON pointer in a URI fragment ("#/properties/a"), or None.
    """

    def __init__(self, message: str, *, keyword: str | None = None, path: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword
        self.path = path


class CapacityError(ForerunError, ValueError):
    """A request can never fit, whatever else runs: the KV pool or the model's context is too small for it."""


class ModelNotFoundError(ForerunError, LookupError):
    """The name is neither in the catalog nor a path to a .gguf file or a model folder."""


class ModelFormatError(ForerunError, ValueError):
    """A model file is truncated, corrupt or contradicts itself."""


class UnsupportedModelError(ForerunError, ValueError):
    """A well-formed model uses an architecture, tensor type or feature that Forerun does not implement."""


class DownloadError(ForerunError, OSError):
    """A model could not be fetched from any of its sources."""


class HashMismatchError(DownloadError):
    """A downloaded or cached file does not have the SHA-256 that the catalog records."""


class CacheError(ForerunError, OSError):
    """The cache directory can't be written or read (full disk, read-only, permission)."""


class ConfigurationError(ForerunError, ValueError):
    """An engine setting or environment variable has a value that can't be used."""


class NumericalError(ForerunError, ArithmeticError):
    """A model's scores are not numbers: damaged weights, or activations that overflow."""


class ConstraintError(ForerunError, RuntimeError):
    """A constrained text can't go on: its grammar has no way out, or costs more than its limits allow."""


class ConstraintWarning(UserWarning):
    """A constraint says something that has no effect on the text, such as a keyword that JSON Schema doesn't know."""


class PlanError(ForerunError, ValueError):
    """Something given to the planner is missing, out of range, or contradicts something else.

    Attributes:
        field: what it is about, by the name of the option, argument or key ("batch", "config.json: hidden_size").
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class DraftError(ForerunError, RuntimeError):
    """A drafter raised, or proposed something that is no tree."""


class DraftWarning(RuntimeWarning):
    """A drafter failed and was turned off; answers go on without it."""


class VerificationError(ForerunError, ValueError):
    """Arrays given to `forerun.verify` don't fit together, or a draft in them is no tree."""
