"""An audit of three rows with made-up findings: one confirmed, one partly, one undecided."""

from collections.abc import Iterator

import pytest

from vllm_teach.errors import ModelNotFoundError
from vllm_teach.validation.audit.check import Undecidable, at_least, near
from vllm_teach.validation.audit.experiment import Register
from vllm_teach.validation.audit.finding import Finding, counted, modelled
from vllm_teach.validation.audit.lab import Lab
from vllm_teach.validation.audit.run import Audit, audit_tables


@pytest.fixture(scope="session")
def small_audit() -> Audit:
    register = Register()

    @register.experiment("A-overall", "memory_reduction", at_least("half of it", "saved", 0.5, "exact"))
    def saved(lab: Lab) -> Iterator[Finding]:
        """Count what is saved."""
        yield counted("saved", 0.75, "of all", "300 requests | paged")

    @register.experiment("B-flash-attention", "time_ms", near("three times", "ratio", 3.0, 2.0, "a factor of 2"))
    def time(lab: Lab) -> Iterator[Finding]:
        """Model both."""
        yield modelled("ratio", 9.0, "x", "A100")

    @register.experiment("B-motivation", "a_200b_parameter_dialogue_model_15_s_per", Undecidable("15 s", "the tokens"))
    def motivation(lab: Lab) -> Iterator[Finding]:
        """Ask how many tokens that is."""
        yield from ()
        raise ModelNotFoundError("model 'x' is not here.")

    return audit_tables(Lab(quick=True), experiments=register, command="vllm-teach validate --quick")
