"""Translates PTX, NVRTC's output for CUDA C++, into C code that runs on the CPU with tests/device/ptx_runtime.h.

Every thread of a block is a fiber. The compiler's actual code runs: its loads and stores with their widths, its
branches and barriers. An instruction that no kernel has needed so far raises an error that names it.
"""
import re
from pathlib import Path

RUNTIME = Path(__file__).parents[1] / "device" / "ptx_runtime.h"

# C's name of a PTX type.
TYPES = {"u8": "uint8_t", "s8": "int8_t", "b8": "uint8_t", "u16": "uint16_t", "s16": "int16_t", "b16": "uint16_t",
         "u32": "uint32_t", "s32": "int32_t", "b32": "uint32_t", "u64": "uint64_t", "s64": "int64_t", "b64": "uint64_t",
         "f32": "float", "f64": "double", "pred": "int"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
BITS = {"float": ("bits_of_f32", "f32_of", "uint32_t"), "double": ("bits_of_f64", "f64_of", "uint64_t")}

_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">",
                "hs": ">="}
_INVERSE = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}
_JOINED = {"and": "&", "or": "|", "xor": "^"}
# The result of an instruction from its operands, all of the instruction's type: N its bits, U the unsigned type.
_SIMPLE = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "neg": "-{0}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
    "not": "~{0}", "min": "{0} < {1} ? {0} : {1}", "max": "{0} > {1} ? {0} : {1}",
    "mul.lo": "(U)((U){0} * 1u * (U){1})", "mad.lo": "(U)((U){0} * 1u * (U){1} + (U){2})",
    "div": "{1} ? {0} / {1} : (T)-1", "rem": "{1} ? {0} % {1} : {0}", "abs": "{0} < 0 ? -{0} : {0}",
    "prmt": "prmt({0}, {1}, {2})", "lop3": "lop3({0}, {1}, {2}, {3})", "brev": "brev({0})", "clz": "clz({0})",
    "bfind": "bfind({0})", "bfind.shiftamt": "31 - bfind({0})", "bfe": "bfe({0}, {1}, {2})",
    "bfi": "bfi({0}, {1}, (uint32_t){2}, (uint32_t){3})", "popc": "(uint32_t)__builtin_popcountll({0})",
    "mul.hi": "((W){0} * (W){1}) >> N",
    "shl": "(uint32_t){1} >= N ? 0 : {0} << ((uint32_t){1} % N)",
    "shf.l": "({1} << {2} % 32) | (uint64_t){0} >> (32 - {2} % 32)",
    "shf.r": "({0} >> {2} % 32) | (uint64_t){1} << (32 - {2} % 32)",
}
_FLOATING = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "fma": "fma({0}, {1}, {2})",
    "rcp": "1 / {0}", "sqrt": "sqrt({0})", "min": "min_T({0}, {1})", "max": "max_T({0}, {1})",
}
_ROUNDED = {"rni": "rint", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}


def _split(text):
    """Splits at commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text)] if text else []


class UnknownInstruction(ValueError):
    pass


class _Kernel:
    """One entry: its lines of C so far, the offsets of shared variables, constants, and the types of registers."""

    def __init__(self, name, shared, constants):
        self.name, self.shared, self.constants, self.registers, self.lines = name, shared, constants, {}, []
        self.accesses = 0

    def operand(self, text, kind):
        """The operand as a C expression of this PTX type."""
        special = re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.x", text)
        if special:
            return f"t->{special[1]}"
        if text == "%laneid":
            return "t->tid % WARP"
        if text.startswith("%"):
            return _converted(_variable(text), self.registers[text], TYPES[kind])
        if text[:2] in ("0f", "0d", "0F", "0D"):
            return f"f32_of(0x{text[2:]}u)" if text[1] in "fF" else f"f64_of(0x{text[2:]}ull)"
        if text in self.shared:
            return f"{self.shared[text]}ull"
        if text in self.constants:
            return f"(uint64_t)(uintptr_t)constant_{text}"
        return f"(({TYPES[kind]}){text}{'ull' if int(text, 0) >= 2**63 else 'll'})"

    def address(self, text):
        base, _, offset = text.strip("[]").partition("+")
        return f"{self.operand(base, 'u64')} + {offset or 0}ll"

    def assign(self, register, expression, kind):
        if register != "_":
            c_type = self.registers[register]
            value = _converted(f"({TYPES[kind]})({expression})", TYPES[kind], c_type)
            self.lines.append(f"{_variable(register)} = {value};")

    def declare(self, prefix, kind, count):
        """Declares registers: %r<7> are seven, count None is one."""
        names = [prefix] if count is None else [f"{prefix}{i}" for i in range(int(count))]
        self.registers.update(dict.fromkeys(names, TYPES[kind]))
        if names:
            self.lines.append(f"{TYPES[kind]} {', '.join(f'{_variable(name)} = 0' for name in names)};")

    def instruction(self, code, operands):
        parts = code.split(".")
        handler = getattr(self, "_" + parts[0], None)
        quoted = f'"{code}"'
        if handler is None:
            handler = self._computed
        elif parts[0] in ("bar", "barrier", "vote", "shfl", "redux"):
            quoted = f'"{code}, number {len(self.lines)}"'      # identifies the call
        try:
            handler(parts, operands, quoted)
        except (KeyError, IndexError, ValueError) as error:
            raise UnknownInstruction(f"{self.name}: {code} {', '.join(operands)}: {error!r}") from None

    # ------------------------------------------------------------------------------------------------- memory

    def _ld(self, parts, operands, quoted):
        if "param" in parts:
            index = int(re.search(r"_param_(\d+)", operands[1])[1])
            word = f"t->param[{index}]"
            self.assign(operands[0], f"f64_of({word})" if parts[-1] == "f64" else word, parts[-1])
            return
        self._access(parts, operands[0], operands[1], "false", quoted)

    def _st(self, parts, operands, quoted):
        self._access(parts, operands[1], operands[0], "true", quoted)

    def _access(self, parts, registers, memory, writes, quoted):
        kind, names = parts[-1], _split(registers.strip("{}"))
        space = next((name for name in ("shared", "const") if name in parts), "global")
        c_type, site = TYPES[kind], self.accesses
        self.accesses += 1
        arguments = f"{self.address(memory)}, sizeof({c_type}) * {len(names)}, {writes}, {quoted}, {site}"
        self.lines.append(f"{{ char *m = {space}_memory(t, {arguments});")
        for i, name in enumerate(names):
            place = f"m + {i} * sizeof({c_type})"
            if writes == "true":
                value = self.operand(name, kind)
                self.lines.append(f"const {c_type} x{i} = {value}; memcpy({place}, &x{i}, sizeof x{i});")
            else:
                self.lines.append(f"{c_type} x{i}; memcpy(&x{i}, {place}, sizeof x{i});")
                self.assign(name, f"x{i}", kind)
        self.lines.append("}")

    # --------------------------------------------------------------------------------------- control and threads

    def _ret(self, parts, operands, quoted):
        self.lines.append("return;")

    def _bra(self, parts, operands, quoted):
        self.lines.append(f"goto {_label(operands[0])};")

    def _bar(self, parts, operands, quoted):
        if parts[1] == "warp":
            self.lines.append(f"warp_meet(t, {self.operand(operands[0], 'u32')}, 0, {quoted});")
        elif parts[1] == "sync":
            self.lines.append(f"barrier(t, 0, {quoted});")
        else:                           # bar.red.OP.TYPE
            result = {"or": "reduced", "and": "reduced_and", "popc": "reduced_sum"}[parts[2]]
            self.lines.append(f"barrier(t, {self.operand(operands[2], 'pred')} != 0, {quoted});")
            self.assign(operands[0], f"t->block->{result}", parts[-1])

    _barrier = _bar

    def _vote(self, parts, operands, quoted):
        mask = self.operand(operands[2], "u32")
        bits = f"ballot(t, {mask}, {self.operand(operands[1], 'pred')}, {quoted})"
        lanes = f"({mask} & (uint32_t)((1ull << warp_end(t)) - 1))"
        test = {"ballot": bits, "any": f"{bits} != 0", "all": f"{bits} == {lanes}"}
        self.assign(operands[0], test[parts[2]], parts[-1])

    def _shfl(self, parts, operands, quoted):
        register = operands[0].partition("|")[0]            # no kernel asks whether the lane existed
        values = ", ".join(self.operand(x, "u32") for x in operands[1:])
        self.assign(register, f"shuffle(t, SHUFFLE_{parts[2].upper()}, {values}, {quoted})", "b32")

    def _redux(self, parts, operands, quoted):
        values = ", ".join(self.operand(x, "u32") for x in operands[1:])
        self.assign(operands[0], f"reduce_warp(t, REDUCE_{parts[2].upper()}, {values}, {quoted})", "u32")

    # ------------------------------------------------------------------------------------------------ arithmetic

    def _mov(self, parts, operands, quoted):
        target, source, kind = operands[0], operands[1], parts[-1]
        several = _split((target if target.startswith("{") else source).strip("{}"))
        bits = int(kind[1:] if kind[1:].isdigit() else 0) // len(several)       # of each, lowest first
        if target.startswith("{"):
            for i, register in enumerate(several):
                self.assign(register, f"{self.operand(source, 'u64')} >> {bits * i}", f"u{bits}")
        elif source.startswith("{"):
            parts = (f"(uint64_t){self.operand(x, f'u{bits}')} << {bits * i}" for i, x in enumerate(several))
            self.assign(target, " | ".join(parts), kind)
        else:
            self.assign(target, self.operand(source, kind), kind)

    def _cvta(self, parts, operands, quoted):
        self.assign(operands[0], self.operand(operands[1], "u64"), "u64")

    def _cvt(self, parts, operands, quoted):
        into, of, mode = parts[-2], parts[-1], parts[1]
        x = self.operand(operands[1], of)
        if mode in _ROUNDED and len(parts) > 3:
            x = f"{_ROUNDED[mode]}({x})"
        if of[0] == "f" and into[0] != "f":
            x = f"to_{TYPES[into]}({x})"
        elif into[0] == "f" and of[0] == "f":
            x = f"canonical_{into}({x})"
        self.assign(operands[0], x, into)

    def _setp(self, parts, operands, quoted):
        comparison, kind = parts[1], parts[-1]
        a, b = (self.operand(x, kind) for x in operands[1:3])
        if kind[0] == "f":
            test = _floating_test(comparison, a, b)
        else:
            test = f"{a} {_COMPARISONS[comparison]} {b}"
        if parts[2] in _JOINED:
            test = f"({test}) {_JOINED[parts[2]]} {self.operand(operands[3], 'pred')}"
        self.assign(operands[0], test, "pred")

    def _selp(self, parts, operands, quoted):
        a, b = (self.operand(x, parts[-1]) for x in operands[1:3])
        self.assign(operands[0], f"{self.operand(operands[3], 'pred')} ? {a} : {b}", parts[-1])

    def _shr(self, parts, operands, quoted):
        kind, bits = parts[-1], parts[-1][1:]
        x, by = self.operand(operands[1], kind), self.operand(operands[2], "u32")
        self.assign(operands[0], f"{by} >= {bits} ? ({x} < 0 ? -1 : 0) : {x} >> ({by} % {bits})", kind)

    def _computed(self, parts, operands, quoted):
        kind = parts[-1]
        values = [self.operand(x, kind) for x in operands[1:]]
        if kind == "pred":
            expression = {"not": "!{0}"}.get(parts[0], _SIMPLE[parts[0]]).format(*values)
        elif parts[1] == "wide":
            kind = WIDER[kind]
            values[:2] = [f"({TYPES[kind]}){x}" for x in values[:2]]
            values[2:] = [self.operand(x, kind) for x in operands[3:]]
            expression = " + ".join([f"{values[0]} * {values[1]}", *values[2:]])
        elif kind[0] == "f" and parts[0] in ("neg", "abs"):     # also for NaN, with any bits
            expression = {"neg": "-{0}", "abs": "fabs({0})"}[parts[0]].format(*values)
        elif kind[0] == "f":
            expression = f"canonical_{kind}({_FLOATING[parts[0]]})".format(*values).replace("_T(", f"_{TYPES[kind]}(")
        else:
            code = next((c for c in (".".join(parts[:2]), parts[0]) if c in _SIMPLE), parts[0])
            bits = int(kind[1:])
            wider = {32: "uint64_t", 64: "__uint128_t"}.get(bits)
            names = {"U": f"uint{bits}_t", "T": TYPES[kind], "W": wider, "N": str(bits)}
            text = re.sub(r"\b[UTWN]\b", lambda m: names[m[0]], _SIMPLE[code])
            expression = text.format(*values)
            kind = "u32" if code in ("popc", "clz") else kind
        self.assign(operands[0], expression, kind)


def _variable(register):
    return "v_" + register[1:]


def _label(name):
    return "L_" + name.replace("$", "_")


def _converted(expression, have, want):
    """A value of one C type as another; bits are kept between integers and floats."""
    if have == want:
        return expression
    if have in BITS:
        return f"({want}){BITS[have][0]}({expression})"
    if want in BITS:
        return f"{BITS[want][1]}(({BITS[want][2]}){expression})"
    return f"({want}){expression}"


def _floating_test(comparison, a, b):
    both = f"({a} == {a} && {b} == {b})"
    if comparison in ("num", "nan"):
        return both if comparison == "num" else f"!{both}"
    if comparison == "ne":
        return f"{both} && {a} != {b}"
    if comparison == "equ":
        return f"!{both} || {a} == {b}"
    if comparison == "neu":
        return f"{a} != {b}"
    if comparison in _COMPARISONS:
        return f"{a} {_COMPARISONS[comparison]} {b}"
    return f"!({a} {_INVERSE[comparison.removesuffix('u')]} {b})"


def _place_shared(line, table, at):
    """Adds a shared variable's address to the table; returns the first address after it."""
    declared = re.match(r"\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?;", line)
    alignment, size = int(declared[1]), int(declared[2][1:]) // 8 * int(declared[4] or 1)
    table[declared[3]] = begin = -(-at // alignment) * alignment
    return begin + size


def _statement(kernel, line):
    register = re.match(r"\.reg \.(\w+)\s+(%\w+?)(?:<(\d+)>)?;", line)
    predicate = re.match(r"@(!?)(%p\d+)\s+", line)
    label = re.fullmatch(r"(\$\w+):", line)
    if register:
        kernel.declare(register[2], register[1], register[3])
    elif label:
        kernel.lines.append(f"{_label(label[1])}: ;")
    elif line in "{}":
        kernel.lines.append(line)
    elif not line.startswith("."):      # a pragma
        code, _, operands = line[predicate.end() if predicate else 0:].rstrip("; ").partition(" ")
        kernel.lines.append("COUNT")
        if predicate:
            kernel.lines.append(f"if ({predicate[1]}{_variable(predicate[2])}) {{")
        kernel.instruction(code.rstrip(";"), _split(operands.strip()))
        if predicate:
            kernel.lines.append("}")


def translate(text):
    """C code that defines, for each kernel, `const struct fake_function emulate_NAME`."""
    text = re.sub(r"//.*", "", text).replace("\t", " ")
    shared, out, at = {}, [RUNTIME.read_text()], 256
    for line in re.findall(r"^\s*(\.shared .*)$", text[:text.index(".visible .entry")], re.MULTILINE):
        at = _place_shared(line, shared, at)
    constants = re.findall(r"^\.const \.align (\d+) \.b8 (\w+)\[\d+\] = (\{[^}]*\});", text, re.MULTILINE)
    out += [f"static _Alignas({alignment}) const uint8_t constant_{name}[] = {values};"
            for alignment, name, values in constants]
    for entry in re.finditer(r"\.visible \.entry (\w+)\(([^)]*)\)(.*?)\n\{(.*?)\n\}\n", text, re.DOTALL):
        name, count = entry[1], entry[2].count(".param")
        kernel, end = _Kernel(name, dict(shared), {name for _, name, _ in constants}), at
        # Braces of inline assembly are on lines of their own.
        for line in re.sub(r"(?m)^\s*([{}])", r"\1\n", entry[4]).split("\n"):
            line = line.strip()
            if line.startswith(".shared"):
                end = _place_shared(line, kernel.shared, end)
            elif line:
                _statement(kernel, line)
        assert end <= 256 + 49152, f"{name} has too much shared memory"
        out += [f"static void body_{name}(struct thread *t)", "{", *kernel.lines, ";}",
                f"static int run_{name}(unsigned blocks, unsigned threads, void **params, reaches_fn reaches)",
                f'{{ return launch(body_{name}, "{name}", blocks, threads, params, {count}, reaches); }}',
                f"API const struct fake_function emulate_{name} = {{run_{name}, {count}}};"]
    return "\n".join(out) + "\n"
