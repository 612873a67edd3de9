"""From the disassembler's text of an instruction to the record that the core executes."""

import re

from . import lanes, mfma
from .code_object import Line
from .core import Instruction, Operand, handler
from .operands import parse, select_code, split
from .refusal import UnknownInstruction

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_SIGNED_IMMEDIATE = ("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmpk_eq_i32", "s_cmpk_lg_i32", "s_cmpk_gt_i32")
_SIGNED_IMMEDIATE += ("s_cmpk_ge_i32", "s_cmpk_lt_i32", "s_cmpk_le_i32", "s_cmovk_i32")
# Modifiers that change nothing that is modelled: cache policy.
_CACHE_POLICY = {"sc0", "sc1", "nt"}
_KNOWN_MODIFIERS = _CACHE_POLICY | {
    "offset",
    "offset0",
    "offset1",
    "op_sel",
    "op_sel_hi",
    "neg_lo",
    "neg_hi",
    "clamp",
    "mul",
    "div",
    "row_mask",
    "bank_mask",
    "bound_ctrl",
    "dst_sel",
    "dst_unused",
    "src0_sel",
    "src1_sel",
    "bitop3",
    "cbsz",
    "blgp",
    "abid",
    "byte_sel",
    *lanes.DPP_CONTROLS,
}


def decode(line: Line, index_of: dict[int, int]) -> Instruction:
    """`index_of` gives the index of the instruction at an address, for branches."""
    mnemonic, _, rest = line.text.partition(" ")
    record = Instruction(address=line.address, target=-1)
    if mnemonic == "s_waitcnt":
        _wait_counts(record, rest)
    elif mnemonic == "s_branch" or mnemonic.startswith("s_cbranch_"):
        record.target = _branch_target(line, rest, index_of)
    elif mnemonic in ("s_nop", "s_sleep", "s_setprio", "s_endpgm", "s_barrier", "s_trap"):
        pass
    else:
        mnemonic = _operands(record, mnemonic, rest)
    record.run = handler(mnemonic)
    if not record.run:
        raise UnknownInstruction(line.text)
    return record


def _branch_target(line: Line, rest: str, index_of: dict[int, int]) -> int:
    """The index of the instruction that a branch of so many words from its end leads to."""
    if not rest.isdigit():
        raise UnknownInstruction(f"{line.text}: a branch by a symbol")
    words = int(rest) - ((int(rest) & 0x8000) << 1)
    address = line.address + 4 + 4 * words
    if address not in index_of:
        raise UnknownInstruction(f"{line.text}: a branch out of the code")
    return index_of[address]


def _wait_counts(record: Instruction, rest: str) -> None:
    """vmcnt and lgkmcnt; a counter that is not named is not waited for (its largest value)."""
    counts = {"vmcnt": 63, "lgkmcnt": 15, "expcnt": 7}
    if re.fullmatch(r"0x[0-9a-f]+|\d+", rest):
        value = int(rest, 0)
        counts = {"vmcnt": value & 15 | value >> 10 & 0x30, "lgkmcnt": value >> 8 & 15}
    else:
        named = re.findall(r"(\w+)\((\d+)\)", rest)
        if not named or any(name not in counts for name, _ in named):
            raise UnknownInstruction(f"s_waitcnt {rest}")
        counts.update((name, int(value)) for name, value in named)
    # At its largest value a counter says nothing: more operations may be outstanding than it can count.
    record.immediate[0] = counts["vmcnt"] if counts["vmcnt"] < 63 else 1 << 20
    record.immediate[1] = counts["lgkmcnt"] if counts["lgkmcnt"] < 15 else 1 << 20


def _operands(record: Instruction, mnemonic: str, rest: str) -> str:
    """Fills in operands and modifiers; gives the name under which the core knows the instruction."""
    texts, modifiers = split(rest)
    encoding = _ENCODING.search(mnemonic)
    name = mnemonic[: encoding.start()] if encoding else mnemonic
    unknown = set(modifiers) - _KNOWN_MODIFIERS
    if unknown:
        raise UnknownInstruction(f"{mnemonic} {rest}: the modifier {', '.join(sorted(unknown))}")
    if name in ("s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32"):
        texts = _hardware_register(record, texts)
    if name.startswith("v_cmp") and not texts[0].startswith(("s", "vcc", "exec")):
        raise UnknownInstruction(f"{mnemonic} {rest}: the result of a compare")
    operands = [_parse(name, text) for text in texts]
    if len(operands) > 6:
        raise UnknownInstruction(f"{mnemonic} {rest}: more than 6 operands")
    for i, operand in enumerate(operands):
        record.operand[i] = operand
    record.operands = len(operands)
    if name in _SIGNED_IMMEDIATE:
        value = operands[1].bits32 & 0xFFFF
        record.operand[1].bits32 = value - ((value & 0x8000) << 1)
    _modifiers(record, name, modifiers, encoding[1] if encoding else "")
    if name.startswith("v_mfma_"):
        return _matrix(record, name, modifiers)
    if "_atomic_" in name:
        record.returns = bool(modifiers.get("sc0"))
    return name


def _parse(name: str, text: str) -> Operand:
    return parse(text, "f64" in name)


def _modifiers(record: Instruction, name: str, modifiers: dict, encoding: str) -> None:
    for key in ("op_sel", "op_sel_hi", "neg_lo", "neg_hi"):
        default = 1 if key == "op_sel_hi" and name.startswith(("v_pk_", "v_dot2_")) else 0
        values = modifiers.get(key, [default] * 4)
        for i, value in enumerate(values):
            getattr(record, key)[i] = value
    record.clamp = bool(modifiers.get("clamp"))
    record.output_scale = {2: 1, 4: 2}.get(modifiers.get("mul"), 0) or (3 if modifiers.get("div") == 2 else 0)
    record.immediate[0] = modifiers.get("bitop3", record.immediate[0])
    if name == "ds_swizzle_b32":
        record.lane_source[:] = [int(lane) for lane in lanes.swizzle(modifiers.get("offset", 0))]
    elif "offset0" in modifiers or "offset1" in modifiers:
        unit = int(name[-2:]) // 8 * (64 if "2st64" in name else 1)
        record.offset[0] = modifiers.get("offset0", 0) * unit
        record.offset[1] = modifiers.get("offset1", 0) * unit
    else:
        record.offset[0] = modifiers.get("offset", 0)
    if encoding.endswith("dpp"):
        source, record.lane_valid, record.lane_enabled = lanes.dpp(modifiers)
        record.lane_source[:] = [int(lane) for lane in source]
        record.dpp = 1
        record.bound_zero = bool(modifiers.get("bound_ctrl"))
    if encoding == "sdwa":
        _sdwa(record, name, modifiers)
    if "byte_sel" in modifiers:
        raise UnknownInstruction(f"{name}: the modifier byte_sel")


def _sdwa(record: Instruction, name: str, modifiers: dict) -> None:
    record.sdwa = 1
    record.result_select = select_code(modifiers.get("dst_sel", "DWORD"))
    record.result_unused = {"UNUSED_PAD": 0, "UNUSED_SEXT": 1, "UNUSED_PRESERVE": 2}[
        modifiers.get("dst_unused", "UNUSED_PAD")
    ]
    first = 2 if re.fullmatch(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32", name) else 1
    for k in range(2):
        if first + k < record.operands:
            record.operand[first + k].select = select_code(modifiers.get(f"src{k}_sel", "DWORD"))


def _hardware_register(record: Instruction, texts: list[str]) -> list[str]:
    """Takes hwreg(...) out of the operands. MODE is the only register that is modelled."""
    found = next(text for text in texts if text.startswith("hwreg("))
    match = re.fullmatch(r"hwreg\((?:HW_REG_MODE|1)(?:, ?(\d+), ?(\d+))?\)", found)
    if not match:
        raise UnknownInstruction(f"the hardware register {found}")
    record.immediate[1], record.immediate[2] = int(match[1] or 0), int(match[2] or 32)
    return [text for text in texts if text != found]


def _matrix(record: Instruction, name: str, modifiers: dict) -> str:
    shape = mfma.shape(name)
    record.matrix = mfma.layout_pointer(shape, modifiers)
    if any(modifiers.get(key) for key in ("neg_lo", "neg_hi", "clamp")):
        raise UnknownInstruction(f"{name}: neg or clamp")
    return f"v_mfma_{shape.accumulator}"
