"""The exchange of tokens between ranks."""
