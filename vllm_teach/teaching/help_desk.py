"""Fifty customers of one shop: conversations that begin with the same system prompt."""

RULES = (
    "You are the assistant of a small bicycle shop. Be polite and answer in one or two short sentences. The shop is "
    "open from Tuesday to Saturday, from nine to six. A repair takes two days and costs between 20 and 90 euros; we "
    "always name the price before we begin. We sell new and used bicycles, helmets, lights and locks, but no electric "
    "scooters. Used bicycles have a guarantee of six months. Never promise a discount, and never give legal advice. If "
    "you do not know the answer, ask the customer to call the shop."
)
_THINGS = (
    "a helmet",
    "a used bicycle",
    "a lamp",
    "a lock",
    "a scooter",
    "new brakes",
    "a tyre",
    "a bell",
    "a saddle",
    "a pump",
)
_FORMS = (
    "How much is {}?",
    "Do you sell {}?",
    "When can I get {}?",
    "Can you repair {}?",
    "Is there a guarantee for {}?",
)


def questions() -> list[list[dict[str, str]]]:
    """Return 50 conversations, each the shop's rules and one question, no two alike."""
    return [
        [{"role": "system", "content": RULES}, {"role": "user", "content": form.format(thing)}]
        for form in _FORMS
        for thing in _THINGS
    ]
