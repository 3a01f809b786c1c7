"""Catalogue of tools for the tool-call task: schemas, argument values, requests.

Called by tools.py only. A `Spec` is one kind of tool under several names, so that
the model reads the schema in its prompt instead of remembering one function.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.corpus import words

Value = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Arg:
    """One argument: its possible names, JSON type, description, value maker and enum."""

    names: tuple[str, ...]
    type: str
    description: str
    value: Value
    enum: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One kind of tool.

    Attributes:
        names: Possible function names.
        description: What the function does.
        args: Required arguments.
        requests: What a user says; {0}, {1} ... stand for the argument values.
        results: Sentences about the result; {r} is the result, {0} ... as above.
        result: Makes a result value for the tool response.
        result_key: Key of the value in the tool response.
    """

    names: tuple[str, ...]
    description: str
    args: tuple[Arg, ...]
    requests: tuple[str, ...]
    results: tuple[str, ...]
    result: Value
    result_key: str


def _pick(pool: list[str] | tuple[str, ...]) -> Value:
    return lambda rng: rng.choice(pool)


def _int(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


_ROOMS = ("kitchen", "bedroom", "bathroom", "office", "hall", "garage", "cellar", "attic")
_TOPICS = (
    tuple(words.ANIMALS) + tuple(words.HOBBIES) + ("history", "music", "science", "sports", "art", "travel", "weather")
)
_CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR")
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Greek", "Polish", "Danish", "Dutch")

CITY = Arg(("city", "location", "place", "town"), "string", "Name of the city", words.city)
NAME = Arg(("name", "person", "contact", "recipient"), "string", "Name of the person", words.person)
DAY = Arg(("day", "weekday"), "string", "Day of the week", _pick(words.DAYS))
ITEM = Arg(("item", "product", "article"), "string", "Name of the item", _pick(words.GOODS))
ROOM = Arg(("room", "area"), "string", "Name of the room", _pick(_ROOMS))
TIME = Arg(("time", "at"), "string", "Time as HH:MM", _time)
MINUTES = Arg(("minutes", "duration"), "integer", "Number of minutes", _int(1, 90))
SIZE = Arg(("size",), "string", "Size of the pizza", _pick(("small", "medium", "large")), ("small", "medium", "large"))


def _count(low: int, high: int, *names: str) -> Arg:
    return Arg(names, "integer", "A number", _int(low, high))


SPECS = (
    Spec(
        ("get_weather", "weather", "current_weather", "get_forecast"),
        "Get the weather of a city",
        (CITY,),
        (
            "What is the weather in {0}?",
            "How is the weather in {0} today?",
            "Weather in {0}",
            "Is it nice in {0} now?",
            "Tell me the weather for {0}.",
            "Do I need an umbrella in {0}?",
        ),
        ("The weather in {0} is {r}.",),
        _pick(words.WEATHER),
        "weather",
    ),
    Spec(
        ("get_temperature", "read_temperature", "temperature"),
        "Get the temperature in a city in degrees",
        (CITY,),
        (
            "What is the temperature in {0}?",
            "How warm is it in {0}?",
            "How cold is {0} right now?",
            "How many degrees in {0}?",
        ),
        ("It is {r} degrees in {0}.",),
        _int(1, 39),
        "degrees",
    ),
    Spec(
        ("get_time", "current_time", "local_time", "clock"),
        "Get the local time in a city",
        (CITY,),
        ("What time is it in {0}?", "Tell me the time in {0}.", "Time in {0}, please.", "How late is it in {0}?"),
        ("It is {r} in {0}.",),
        _time,
        "time",
    ),
    Spec(
        ("set_timer", "start_timer", "timer"),
        "Start a timer",
        (MINUTES,),
        ("Set a timer for {0} minutes.", "Start a {0} minute timer.", "Timer, {0} minutes", "Wake me in {0} minutes."),
        ("The timer for {0} minutes is {r}.",),
        _pick(("running", "set", "on")),
        "status",
    ),
    Spec(
        ("set_alarm", "create_alarm", "alarm"),
        "Set an alarm",
        (TIME,),
        ("Set an alarm for {0}.", "Wake me up at {0}.", "Alarm at {0}, please.", "I have to get up at {0}."),
        ("The alarm for {0} is {r}.",),
        _pick(("set", "on", "ready")),
        "status",
    ),
    Spec(
        ("add", "add_numbers", "sum_numbers"),
        "Add two numbers",
        (_count(100, 999, "a", "x", "first"), _count(100, 999, "b", "y", "second")),
        ("Add {0} and {1}.", "What is {0} + {1}?", "How much is {0} plus {1}?", "Sum of {0} and {1}"),
        ("The sum of {0} and {1} is {r}.",),
        _int(200, 1998),
        "sum",
    ),
    Spec(
        ("multiply", "multiply_numbers", "times"),
        "Multiply two numbers",
        (_count(13, 99, "a", "x", "first"), _count(13, 99, "b", "y", "second")),
        ("Multiply {0} by {1}.", "What is {0} times {1}?", "How much is {0} * {1}?", "{0} x {1}"),
        ("{0} times {1} is {r}.",),
        _int(169, 9801),
        "product",
    ),
    Spec(
        ("send_message", "send_text", "message", "text_person"),
        "Send a short message to a person",
        (
            NAME,
            Arg(
                ("text", "message", "body"),
                "string",
                "Text of the message",
                _pick(
                    (
                        "I am late",
                        "see you soon",
                        "call me back",
                        "dinner is ready",
                        "happy birthday",
                        "thank you",
                        "I am home",
                        "the train is late",
                        "good morning",
                        "good night",
                        "bring some bread",
                        "where are you",
                        "I will be there",
                    )
                ),
            ),
        ),
        (
            'Send {0} the message "{1}".',
            "Tell {0}: {1}",
            'Text {0} "{1}".',
            "Write to {0}: {1}",
            "Message {0} that says {1}",
        ),
        ("Your message to {0} was {r}.",),
        _pick(("sent", "delivered")),
        "status",
    ),
    Spec(
        ("call_person", "phone_call", "make_call", "dial"),
        "Call a person by phone",
        (NAME,),
        (
            "Call {0}.",
            "Phone {0}, please.",
            "I want to talk to {0} on the phone.",
            "Ring {0}.",
            "Please call {0} for me.",
        ),
        ("The call to {0} is {r}.",),
        _pick(("running", "open", "over")),
        "status",
    ),
    Spec(
        ("turn_on_light", "light_on", "switch_on_light"),
        "Turn on the light in a room",
        (ROOM,),
        ("Turn on the light in the {0}.", "Light on in the {0}.", "It is dark in the {0}.", "Switch the {0} light on."),
        ("The light in the {0} is {r}.",),
        _pick(("on", "bright")),
        "light",
    ),
    Spec(
        ("turn_off_light", "light_off", "switch_off_light"),
        "Turn off the light in a room",
        (ROOM,),
        (
            "Turn off the light in the {0}.",
            "Light off in the {0}.",
            "Make it dark in the {0}.",
            "Switch the {0} light off.",
        ),
        ("The light in the {0} is {r}.",),
        _pick(("off", "dark")),
        "light",
    ),
    Spec(
        ("set_heating", "set_thermostat", "heat_room"),
        "Set the heating of a room",
        (ROOM, _count(15, 28, "degrees", "temperature")),
        (
            "Set the {0} to {1} degrees.",
            "Heat the {0} to {1} degrees.",
            "Make it {1} degrees in the {0}.",
            "{1} degrees in the {0}, please.",
        ),
        ("The {0} is set to {1} degrees and {r}.",),
        _pick(("heating", "ready")),
        "status",
    ),
    Spec(
        ("play_music", "play", "start_music"),
        "Play music of an artist",
        (Arg(("artist", "musician", "singer"), "string", "Name of the artist", words.person),),
        ("Play music by {0}.", "I want to hear {0}.", "Put on some {0}.", "Play something from {0}."),
        ("Music by {0} is {r}.",),
        _pick(("playing", "on")),
        "status",
    ),
    Spec(
        ("order_pizza", "buy_pizza", "pizza_order"),
        "Order pizza",
        (SIZE, _count(1, 9, "count", "quantity", "number")),
        ("Order {1} {0} pizzas.", "I want {1} {0} pizzas.", "{1} pizzas, {0}, please.", "Get me {1} {0} pizzas."),
        ("Your {1} {0} pizzas are {r}.",),
        _pick(("ordered", "ready", "on the way")),
        "status",
    ),
    Spec(
        ("book_table", "reserve_table", "table_booking"),
        "Book a table in a restaurant",
        (DAY, TIME, _count(1, 12, "people", "guests", "seats")),
        (
            "Book a table for {2} on {0} at {1}.",
            "We are {2} people and want to eat on {0} at {1}.",
            "Table for {2} people, {0}, {1}",
            "Reserve a table at {1} on {0} for {2} people.",
        ),
        ("The table for {2} on {0} at {1} is {r}.",),
        _pick(("booked", "free", "reserved")),
        "status",
    ),
    Spec(
        ("find_train", "search_trains", "train_search", "next_train"),
        "Find a train between two cities",
        (
            Arg(("from", "origin", "start"), "string", "City of departure", words.city),
            Arg(("to", "destination", "end"), "string", "City of arrival", words.city),
        ),
        (
            "Find a train from {0} to {1}.",
            "When does the next train from {0} to {1} leave?",
            "Train from {0} to {1}",
            "I want to go from {0} to {1} by train.",
        ),
        ("The train from {0} to {1} leaves at {r}.",),
        _time,
        "departure",
    ),
    Spec(
        ("book_hotel", "reserve_hotel", "hotel_booking"),
        "Book a hotel room in a city",
        (CITY, _count(1, 14, "nights", "days")),
        (
            "Book a hotel in {0} for {1} nights.",
            "I need a hotel in {0}, {1} nights.",
            "Find me a room in {0} for {1} nights.",
            "Hotel, {0}, {1} nights",
        ),
        ("The hotel in {0} for {1} nights costs {r} dollars.",),
        _int(50, 990),
        "price",
    ),
    Spec(
        ("get_price", "price_of", "check_price", "lookup_price"),
        "Get the price of an item",
        (ITEM,),
        ("How much does a {0} cost?", "What is the price of the {0}?", "Price of a {0}", "How expensive is the {0}?"),
        ("The {0} costs {r} dollars.",),
        _int(2, 300),
        "price",
    ),
    Spec(
        ("check_stock", "get_stock", "stock_level"),
        "Check how many pieces of an item are in stock",
        (ITEM,),
        (
            "Do we have a {0} in stock?",
            "How many pieces of {0} are left?",
            "Check the stock of the item {0}.",
            "Is the {0} in stock?",
        ),
        ("There are {r} pieces of {0} in stock.",),
        _int(2, 300),
        "stock",
    ),
    Spec(
        ("add_to_cart", "add_item", "put_in_cart"),
        "Put an item into the shopping cart",
        (ITEM, _count(1, 20, "count", "quantity", "amount")),
        (
            "Add {1} of the item {0} to my cart.",
            "Put {1} x {0} in the cart.",
            "I want to buy {1} pieces of {0}.",
            "Cart: {1} {0}",
        ),
        ("I put {1} of {0} in the cart; it is {r}.",),
        _pick(("saved", "ready")),
        "status",
    ),
    Spec(
        ("create_event", "add_event", "new_event", "schedule_event"),
        "Put an event into the calendar",
        (
            Arg(
                ("title", "name", "event"),
                "string",
                "Title of the event",
                _pick(("meeting", "lunch", "dinner", "party", "concert", "lesson", "picnic", "workshop")),
            ),
            DAY,
            TIME,
        ),
        (
            "Put a {0} on {1} at {2} in my calendar.",
            "Schedule a {0} for {1} at {2}.",
            "New event: {0}, {1}, {2}",
            "I have a {0} on {1} at {2}.",
        ),
        ("The {0} on {1} at {2} is {r}.",),
        _pick(("saved", "planned")),
        "status",
    ),
    Spec(
        ("get_calendar", "list_events", "show_calendar"),
        "List the events of a day",
        (DAY,),
        ("What do I have on {0}?", "Show my calendar for {0}.", "Any events on {0}?", "What is planned for {0}?"),
        ("You have {r} events on {0}.",),
        _int(2, 9),
        "events",
    ),
    Spec(
        ("search_web", "web_search", "search", "find_pages"),
        "Search the web",
        (Arg(("query", "q", "topic", "text"), "string", "What to search for", _pick(_TOPICS)),),
        ("Search the web for {0}.", "Find pages about {0}.", "Look up {0} online.", "Search for {0}."),
        ("I found {r} pages about {0}.",),
        _int(2, 900),
        "pages",
    ),
    Spec(
        ("translate", "translate_word", "get_translation"),
        "Translate a word into a language",
        (
            Arg(("word", "text", "phrase"), "string", "Word to translate", _pick(words.OBJECTS)),
            Arg(("language", "target", "lang"), "string", "Target language", _pick(_LANGUAGES)),
        ),
        ("Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?", "{0} in {1}, please."),
        ("The {1} translation of {0} is {r}.",),
        words.made_up_word,
        "translation",
    ),
    Spec(
        ("convert_currency", "exchange", "convert_money"),
        "Convert money between currencies",
        (
            _count(1, 999, "amount", "value"),
            Arg(("from", "source"), "string", "Currency to convert from", _pick(_CURRENCIES)),
            Arg(("to", "target"), "string", "Currency to convert to", _pick(_CURRENCIES)),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}.", "{0} {1} in {2}?"),
        ("{0} {1} are {r} {2}.",),
        _int(1, 999),
        "amount",
    ),
    Spec(
        ("roll_dice", "roll", "throw_dice"),
        "Roll dice",
        (_count(1, 10, "count", "dice", "number"),),
        ("Roll {0} dice.", "Throw {0} dice for me.", "Please roll {0} dice.", "{0} dice"),
        ("The dice show {r}.",),
        _int(1, 60),
        "total",
    ),
    Spec(
        ("read_file", "open_file", "load_file", "get_file"),
        "Read a text file",
        (
            Arg(
                ("path", "file", "filename"),
                "string",
                "Name of the file",
                lambda rng: f"{rng.choice(words.OBJECTS)}.{rng.choice(('txt', 'md', 'csv', 'json'))}",
            ),
        ),
        ("Read the file {0}.", "What is in {0}?", "Open {0}.", "Show me {0}."),
        ("The file {0} has {r} lines.",),
        _int(2, 900),
        "lines",
    ),
    Spec(
        ("get_user", "find_user", "lookup_user", "fetch_user"),
        "Look up a user by number",
        (_count(1, 9999, "id", "user_id", "number"),),
        ("Look up user {0}.", "Who is user number {0}?", "Show me user {0}.", "Get the user with the id {0}."),
        ("User {0} is {r}.",),
        _pick(words.NAMES),
        "name",
    ),
    Spec(
        ("take_note", "save_note", "add_note", "remember"),
        "Save a note",
        (
            Arg(
                ("text", "note", "content"),
                "string",
                "Text of the note",
                lambda rng: (
                    f"{rng.choice(('buy', 'find', 'bring', 'clean', 'sell', 'fix'))} the {rng.choice(words.OBJECTS)}"
                ),
            ),
        ),
        ("Note: {0}", "Remember to {0}.", "Write down: {0}", "Save a note that says {0}."),
        ("I saved the note to {0} as number {r}.",),
        _int(1, 99),
        "number",
    ),
    Spec(
        ("move_robot", "drive", "move", "go"),
        "Move the robot",
        (
            Arg(
                ("direction", "way"),
                "string",
                "Where to go",
                _pick(("left", "right", "forward", "back")),
                ("left", "right", "forward", "back"),
            ),
            _count(1, 50, "steps", "distance"),
        ),
        ("Move {0} {1} steps.", "Go {1} steps {0}.", "Robot: {0}, {1} steps", "Drive {1} steps to the {0}."),
        ("The robot went {1} steps {0} and is {r}.",),
        _pick(("ready", "waiting", "there")),
        "status",
    ),
)
