"""`python -m vllm_teach.validation.equivalence`."""

import sys

from vllm_teach.validation.equivalence.command import main

sys.exit(main())
