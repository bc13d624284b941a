"""`python -m vllm_teach.cli` is `vllm-teach`."""

import sys

from vllm_teach.cli import main

sys.exit(main())
