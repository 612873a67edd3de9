"""Facts of the Hopper kernels' machine code, read with cuobjdump: python .ci/sass.py OBJECT ...

Every kernel in the objects must multiply with wgmma (HGMMA, QGMMA) and load with the tensor copy engine (UTMALDG), and
none may use local memory, which is where spilled registers go. Operands of the products are meant to stay in uniform
registers: a kernel that moves more than two words a product there has lost that (it then issues more instructions for
operands than for products). Products are meant to overlap: a kernel with a wait for nearly every one has
been serialised by the compiler. Prints one line a kernel; exits with 1 if a fact does not hold.
"""

import re
import subprocess
import sys

MOVES_A_PRODUCT = 2
WAITS_A_PRODUCT = 0.75
# Products, loads by the copy engine, moves to uniform registers, waits for products.
PATTERNS = (r"\b[HQ]GMMA\.", r"\bUTMALDG\.|\bUBLKCP\b", r"\bR2UR\b", r"\bWARPGROUP\.DEPBAR\b")


def cuobjdump(option: str, path: str) -> str:
    return subprocess.run(["cuobjdump", option, path], check=True, capture_output=True, text=True).stdout


def short(name: str) -> str:
    """The mangled name of a kernel's instance, as in "decode_kernel bf16 24"."""
    kernel = re.search(r"(?:fp)?[a-z_]*(?:8_)?[a-z]*_kernel(?=I)", name)
    elements = {"E4M3FN": "e4m3fn", "6__half": "f16", "13__nv_bfloat16": "bf16", "DsMla": "ds_mla", "PerTensor": "fp8"}
    element = "/".join(short for mangled, short in elements.items() if mangled in name)
    rows = re.search(r"ShapeI\w*?Li(\d+)", name) or re.search(r"sparse_kernelI\w*?Li(\d+)", name)
    masked = "masked" if "prefill_kernel" in name and "Lb1E" in name else ""
    return " ".join([kernel[0] if kernel else name, element, rows[1] if rows else masked])


def facts(path: str):
    """(name, registers, bytes of local memory, then what PATTERNS count) of each kernel."""
    usage = {
        name: (int(registers), int(stack) + int(local))
        for name, registers, stack, local in re.findall(
            r"Function (\S+):\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", cuobjdump("-res-usage", path)
        )
    }
    for section in cuobjdump("-sass", path).split("Function : ")[1:]:
        name = section.split(None, 1)[0]
        counts = [len(re.findall(pattern, section)) for pattern in PATTERNS]
        yield short(name), *usage[name], *counts


def main(paths: list[str]) -> int:
    failed = False
    print(f"{'kernel':32} {'registers':>9} {'local':>5} {'products':>8} {'loads':>5} {'moves':>5} {'waits':>5}")
    for path in paths:
        for name, registers, local, products, loads, moves, waits in facts(path):
            good = local == 0 and products > 0 and loads > 0 and moves <= MOVES_A_PRODUCT * products
            good = good and waits <= WAITS_A_PRODUCT * products
            failed = failed or not good
            counts = f"{registers:9} {local:5} {products:8} {loads:5} {moves:5} {waits:5}"
            print(f"{name:32} {counts}{'' if good else '  WRONG'}")
    return int(failed or not paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
