"""The document of the interface against its server: bodies that it allows, and bodies that it does not, made up by Schemathesis. None is answered
with a 500, or in a way that the document does not tell of.

PAGED_EXAMPLES asks for more than the short run of the suite (`make served`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .serving_process import served  # noqa: TID252

EXAMPLES = os.environ.get("PAGED_EXAMPLES", "4")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TOOL = shutil.which("schemathesis", path=str(Path(sys.executable).parent))


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="schemathesis, a test tool of the extra `dev`, is not installed")
def test_what_the_document_allows_and_what_it_does_not_is_answered_as_it_says(tmp_path):
    options = ["--checks", CHECKS, "--mode", "all", "--no-color", "--max-examples", EXAMPLES, "--warnings", "off"]
    options += ["--generation-deterministic", "--phases", "coverage,fuzzing", "--request-timeout", "30"]
    # Answers of a thousand tokens say no more than short ones.
    with served(max_model_len=96) as server:
        command = [TOOL, "run", f"{server.url}/openapi.json", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        print(done.stdout.split("Test cases:")[1])
