"""``python -m jax_mla``: what is built here (info), a first run (demo), and times (bench)."""

import argparse
import sys

from jax_mla import _ffi, bench, demo, info


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_mla", description="Multi-head Latent Attention for JAX.")
    commands = parser.add_subparsers(title="commands")
    for module, name, text in (
        (demo, "demo", "prefill and decode with Kimi-K3's attention layers, checked"),
        (info, "info", "show versions, devices and what runs natively"),
        (bench, "bench", "time decode on shapes of your own or a table, beside XLA and peers, checked"),
    ):
        command = commands.add_parser(name, help=text, description=text + ".")
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    if not _ffi.MODULES:
        print(
            "No native module is built here, so that everything runs through XLA. In a checkout, python -P -m jax_mla "
            "finds the installed package instead of its sources.\n"
        )
    try:
        return arguments.run(arguments)
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
