"""The stages of `device_check.py`: what runs on the card that is here, and what is written about it."""
