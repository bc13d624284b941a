"""`python -m vllm_teach.validation.gpu`."""

import sys

from vllm_teach.validation.gpu.script import main

sys.exit(main())
