"""The text that the measures are tested on."""

TEXT = """PROSPERO.
Our revels now are ended. These our actors, as I foretold you, were all spirits, and are melted into air, into thin air.

    def push(self, item):
        # éèü: bytes are not letters
        self.items.append(item)
        return len(self.items)

MIRANDA.
If by your art, my dearest father, you have put the wild waters in this roar, allay them. The sky, it seems, would pour down
stinking pitch, but that the sea, mounting to the welkin's cheek, dashes the fire out.
"""
