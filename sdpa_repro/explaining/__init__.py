"""Why a call fails: the conditions, the lengths, what was computed instead, and whether it is known."""
