"""The gateway, a process of its own (`fedgate`): people's programs ask over HTTP."""
