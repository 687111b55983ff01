"""The gateway that records what agents say: protocols, sessions, conversation tree, tokens."""
