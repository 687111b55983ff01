"""``python -m agentrl_cli`` and the ``agentrl`` command."""

from agentrl_cli.cli.app import main

if __name__ == "__main__":
    main()
