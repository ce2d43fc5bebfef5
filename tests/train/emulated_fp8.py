"""A rank of a run whose products are rounded to fp8, on a CPU."""

from unittest import mock

from slipstream.train import build, fp8, session


def run(world, config):
    """How many linear layers this rank multiplies so."""
    from torchao.float8 import Float8LinearConfig

    found = []

    def preparation(_):
        def prepare(module):
            fp8.in_fp8(module, "tensorwise")
            found.extend(m for m in module.modules() if type(m).__name__ == "Float8Linear")
            return module

        return prepare

    with (
        mock.patch.object(build, "preparation", preparation),
        mock.patch.object(fp8, "_options", return_value=Float8LinearConfig(emulate=True)),
    ):
        session.run_rank(world, config)
    return len(found)
