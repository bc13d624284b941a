from vllm_teach.teaching.help_desk import RULES, questions


def test_fifty_conversations_with_one_beginning() -> None:
    asked = questions()
    assert len({messages[1]["content"] for messages in asked}) == len(asked) == 50
    assert {messages[0]["content"] for messages in asked} == {RULES}
    assert {tuple(message["role"] for message in messages) for messages in asked} == {("system", "user")}
