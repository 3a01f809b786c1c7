"""The engine: its core, the ways to reach it, and the front-end that turns requests into steps and steps into text."""
