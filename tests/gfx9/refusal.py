"""What the emulator raises."""


class EmulatorError(Exception):
    """A launch that went wrong: out of bounds, a race, a missing wait, or something that is not modelled."""


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of one, that the emulator does not know."""
