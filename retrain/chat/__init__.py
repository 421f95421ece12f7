"""Messages to tokens and back, prefix-exact: conversation, template, tokens, tools."""

from retrain.chat.conversation import Chat, Conversation

__all__ = ["Chat", "Conversation"]
