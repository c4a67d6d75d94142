"""Params: an int past 32 bits was taken, messages lacked their mend, a huge int for a float left with a traceback."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build, samples
from attngen.options import Options
from attngen.specs import resolve

SPEC = (
    "attn 1\nattention a {\n  head_dim = 64\n  param keys: int >= 1 = 16\n  param cap: float = 2.0\n"
    "  mask  = q_pos - kv_idx < keys\n  score = s * cap\n}\n"
)


@pytest.mark.parametrize("given", [{"keys": "0"}, {"keys": "99999999999"}, {"keys": "3.5"}, {"cap": "nan"}])
def test_a_bad_value_on_the_command_line(given: dict[str, str]) -> None:
    with pytest.raises(AttnError) as caught:
        samples.params(resolve(SPEC, None, Options()), given)
    (fault,) = caught.value.diagnostics
    assert fault.code == "E0603"
    assert fault.helps
    assert ".. " not in fault.message


@pytest.mark.parametrize(("given", "code"), [({"cap": 10**400}, "E0603"), ({"keys": None}, "E0602")])
def test_a_bad_value_in_a_call(given: dict[str, object], code: str) -> None:
    q, k, v = torch.zeros(3, 1, 4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(AttnError) as caught:
        build(SPEC)(q, k, v, **given)
    (fault,) = caught.value.diagnostics
    assert fault.code == code
    assert "without a default" not in str(fault.notes)
