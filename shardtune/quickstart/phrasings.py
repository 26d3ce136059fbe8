"""What do the quickstart's people say? Phrasings and slot values written for shardtune; train and test share none.

Data only; `sentences.py` draws from it. A phrasing carries no final full stop (the generator adds one now and then), a
`?` stays or is dropped, and every `{slot}` is filled from the values of that slot, which become the slot's text in the
answer. Titles, artists and restaurants are made up.

Openings such as "I'd like", "Let me", "Can we" or "Get" stand in every intent on purpose: where one belongs to a single
intent, a small model learns the opening instead of the meaning, and misreads the held-out phrasings that share it.
"""

from __future__ import annotations

# The order of an intent's slots is the order of the keys in its JSON answer.
SLOTS: dict[str, tuple[str, ...]] = {
    "get_weather": ("place", "day"),
    "play_music": ("song", "artist"),
    "book_restaurant": ("restaurant", "people", "day", "time"),
    "set_timer": ("duration", "label"),
    "send_message": ("contact", "message"),
    "add_reminder": ("task", "day", "time"),
    "set_lights": ("room", "colour", "brightness"),
    "get_directions": ("destination", "origin", "mode"),
}

TRAIN_PHRASINGS: dict[str, tuple[str, ...]] = {
    "get_weather": (
        "What's the weather like in {place} {day}?",
        "What will the weather be in {place} {day}?",
        "How's the weather in {place}?",
        "Weather in {place} {day}",
        "Weather for {place}",
        "Is it going to rain in {place} {day}?",
        "Will it snow in {place} {day}?",
        "Do I need a jacket in {place} {day}?",
        "How hot will it get in {place} {day}?",
        "Is it cold in {place} right now?",
        "Give me the forecast for {place} {day}",
        "Show me the forecast for {place}",
        "Tell me what the sky looks like over {place} {day}",
        "What's the temperature in {place}?",
        "How many degrees will it be {day} in {place}?",
        "{day} I'm flying to {place}, what's the weather going to be?",
        "I'm in {place} {day}, will it be sunny?",
        "Can I expect wind in {place} {day}?",
        "Should I pack sunscreen for {place} {day}?",
        "Is there a storm coming to {place} {day}?",
        "How humid is {place} {day}?",
        "I'd like to know the weather in {place} {day}",
        "Check the weather {day} in {place}",
        "Will {place} be foggy {day}?",
        "Would you check whether it rains in {place} {day}?",
        "What can I expect from the weather in {place}?",
        "I'd like a forecast for {place}",
        "I'm wondering if it will rain in {place} {day}",
        "Let me see the weather for {place} {day}",
        "Can we have a picnic in {place} {day} or will it rain?",
        "Find out how cold {place} gets {day}",
        "Get me the forecast {day} for {place}",
        "Let me know if it rains in {place} {day}",
        "Try the forecast for {place}",
        "Please say how the weather in {place} is {day}",
        "Will we see the sun {day} in {place}?",
    ),
    "play_music": (
        "Play {song} by {artist}",
        "Play {song}",
        "Put on {song} by {artist}",
        "Put on some {artist}",
        "Play some songs by {artist}",
        "Can you play {song}?",
        "Could you play something by {artist}?",
        "I want to hear {song} by {artist}",
        "I'd love to listen to {artist}",
        "Start playing {song} by {artist}",
        "Queue up {song} by {artist}",
        "Add {song} to the queue",
        "Next song should be {song} from {artist}",
        "Let's listen to some {artist}",
        "Music please, {song} if you have it",
        "Put a record by {artist} on",
        "Shuffle songs by {artist}",
        "Play me the latest from {artist}",
        "I feel like {artist}, play something",
        "Turn up {song} by {artist}",
        "Play the track {song} from {artist}",
        "Do you have {song} by {artist}?",
        "A song by {artist} would be nice",
        "Repeat {song}",
        "I could use some {artist} right now",
        "Would you put {artist} on?",
        "Please play {song} again",
        "The song {song} by {artist}, please",
        "I'd like some music by {artist}",
        "I'm missing {song} by {artist}, play it",
        "Let's have {song}",
        "Can we hear {song} by {artist}?",
        "Find me something from {artist} to dance to",
        "Get {artist} playing",
        "Let me have {song} next",
        "Start with {song} by {artist}",
        "Set the mood with {song}",
        "Try {song} by {artist}",
        "Turn on {song}",
        "Will you play {artist} tonight?",
    ),
    "book_restaurant": (
        "Book a table at {restaurant} for {people} {day} at {time}",
        "Book {restaurant} for {people} at {time}",
        "Reserve a table for {people} at {restaurant} {day}",
        "Reserve {restaurant} {day} at {time} for {people}",
        "Get us a table at {restaurant} for {people}",
        "Can you get me a reservation at {restaurant} {day}?",
        "I need a table for {people} at {restaurant} at {time}",
        "I'd like to book {restaurant} {day} for {people}",
        "Make a reservation at {restaurant} for {people} {day} at {time}",
        "Make a booking for {people} at {restaurant} {day}",
        "Table for {people} at {restaurant} {day}",
        "Table for {people}, {restaurant}, {day} at {time}",
        "Find me a free table at {restaurant} at {time} {day}",
        "We are {people} and want to have dinner at {restaurant} {day}",
        "Dinner for {people} at {restaurant} {day}, book it",
        "Please reserve lunch at {restaurant} for {people} {day}",
        "Could you book us into {restaurant} at {time}?",
        "Is there a table at {restaurant} for {people} {day} at {time}?",
        "{day} we're eating at {restaurant}, book for {people}",
        "See if {restaurant} can take {people} {day} at {time}",
        "Arrange dinner at {restaurant} at {time} for {people}",
        "Hold a table for {people} at {restaurant} at {time} {day}",
        "Would you call {restaurant} and book for {people} at {time}?",
        "Does {restaurant} have room for {people} {day}?",
        "Booking at {restaurant} for {people}, {day}",
        "I'd like dinner at {restaurant} at {time}",
        "I'm hungry for {restaurant}, table for {people} at {time}",
        "Let's eat at {restaurant} {day}, we are {people}",
        "Can we go to {restaurant} {day} at {time}?",
        "Let me have a table at {restaurant} {day} at {time}",
        "Set up dinner at {restaurant} for {people} {day}",
        "Find out if {restaurant} has space for {people} at {time}",
        "Will {restaurant} take {people} {day}?",
        "Let {restaurant} know we are {people} {day}",
        "Start a booking at {restaurant}, {people} at {time}",
        "Get {people} into {restaurant} {day}",
    ),
    "set_timer": (
        "Set a timer for {duration}",
        "Set a {label} timer for {duration}",
        "Start a timer for {duration}",
        "Start a {label} timer, {duration}",
        "Timer for {duration}",
        "{label} timer for {duration}",
        "{duration} timer please",
        "{duration} on the clock for the {label}",
        "Count down {duration}",
        "Give me {duration}",
        "Give me a {duration} countdown for the {label}",
        "Can you set a timer for {duration}?",
        "Could you time the {label} for {duration}?",
        "Time {duration} for the {label}",
        "The {label} needs {duration}, set a timer",
        "I need a timer for {duration}",
        "Put {duration} on the timer",
        "New timer, {duration}, call it {label}",
        "Set the {label} countdown to {duration}",
        "Tell me when {duration} have passed",
        "Make it ring after {duration}",
        "Wake me from my nap in {duration}",
        "Begin a countdown of {duration}",
        "Alert me in {duration}",
        "Ring when {duration} are over",
        "Would you set {duration} for the {label}?",
        "Let the {label} go for {duration}",
        "I'd like to be alerted in {duration}",
        "I'm making the {label}, give me {duration}",
        "Let me know after {duration}",
        "Can I have {duration} on the clock?",
        "Let's do {duration} of {label}",
        "Get me a timer of {duration}",
        "I want {duration} for my {label}",
        "How about a {duration} timer?",
        "Play a sound in {duration}",
        "Tell me when the {label} is done, {duration}",
        "Please time {duration}",
        "Will you count {duration} for the {label}?",
    ),
    "send_message": (
        "Text {contact} that {message}",
        "Text {contact} {message}",
        "Tell {contact} {message}",
        "Tell {contact} that {message}",
        "Send {contact} a message saying {message}",
        "Send a message to {contact}: {message}",
        "Send a text to {contact}, {message}",
        "Message {contact}: {message}",
        "Message {contact} that {message}",
        "Let {contact} know that {message}",
        "Let {contact} know {message}",
        "Write to {contact} that {message}",
        "Write {contact} a text: {message}",
        "Can you text {contact} that {message}?",
        "Could you tell {contact} {message}?",
        "Please inform {contact} that {message}",
        "New message to {contact}: {message}",
        "I want to tell {contact} that {message}",
        "Reply to {contact} with {message}",
        "Answer {contact}: {message}",
        "Say to {contact} that {message}",
        "Drop {contact} a note that {message}",
        "Would you write {contact} that {message}?",
        "Give {contact} a message: {message}",
        "Get a message to {contact} saying {message}",
        "I'd like to tell {contact} that {message}",
        "I'm supposed to tell {contact} {message}",
        "Let my message to {contact} be {message}",
        "Can we tell {contact} that {message}?",
        "Find {contact} in my contacts and write {message}",
        "Get {contact} on chat and say {message}",
        "Quick text for {contact}: {message}",
        "Start a chat with {contact} and write {message}",
        "Contact {contact} and say {message}",
        "Will you tell {contact} that {message}?",
    ),
    "add_reminder": (
        "Remind me to {task} {day}",
        "Remind me to {task} at {time}",
        "Remind me to {task} {day} at {time}",
        "Remind me {day} to {task}",
        "Remind me at {time} to {task}",
        "Set a reminder to {task} {day}",
        "Set a reminder for {time} to {task}",
        "Add a reminder to {task}",
        "Add a reminder {day} at {time}: {task}",
        "Create a reminder to {task} {day}",
        "Can you remind me to {task}?",
        "Could you remind me {day} at {time} to {task}?",
        "Don't let me forget to {task} {day}",
        "Don't let me forget to {task}",
        "I must not forget to {task} {day}",
        "I have to {task} {day}, remind me",
        "I need a reminder to {task} at {time}",
        "Reminder: {task} {day}",
        "Reminder for {day}, {task}",
        "Please remind me that I have to {task} {day}",
        "Put {task} on my list for {day}",
        "Nudge me at {time} to {task}",
        "Make sure I {task} {day}",
        "Would you remind me {day} to {task}?",
        "Keep in mind that I need to {task} {day}",
        "At {time} I have to {task}, set a reminder",
        "I'd like to remember to {task} {day}",
        "I'm going to forget to {task} {day}, remind me",
        "Let me remember to {task} at {time}",
        "Can I get a reminder to {task} {day}?",
        "Get me to {task} {day} at {time}",
        "Start reminding me to {task} {day}",
        "Tell me to {task} {day}",
        "Tell me at {time} to {task}",
        "Try not to let me forget to {task}",
        "Note for {day}: {task}",
        "I should {task} {day} at {time}, note that",
        "Will you remind me to {task} at {time}?",
    ),
    "set_lights": (
        "Set the {room} lights to {colour}",
        "Set the lights in the {room} to {brightness}",
        "Set the {room} lights to {colour} at {brightness}",
        "Turn the {room} lights {colour}",
        "Turn the lights in the {room} to {brightness}",
        "Turn on the {room} lights",
        "Turn off the lights in the {room}",
        "Switch on the light in the {room}",
        "Switch the {room} light to {colour}",
        "Dim the {room} lights to {brightness}",
        "Dim the lights in the {room}",
        "Make the {room} lights {colour}",
        "Make the {room} {colour} and bright",
        "Change the {room} lights to {colour}",
        "Change the brightness in the {room} to {brightness}",
        "Can you turn on the lights in the {room}?",
        "Could you make the light in the {room} {colour}?",
        "Lights in the {room} to {brightness}",
        "{room} lights to {brightness} please",
        "{room} lights off",
        "I want {colour} light in the {room}",
        "It's too dark in the {room}, lights to {brightness}",
        "Lower the {room} lamp to {brightness}",
        "Brighten the {room} to {brightness}",
        "Would you switch the {room} lights on?",
        "Please turn the lights off in the {room}",
        "Give me {colour} lights in the {room}",
        "I'd like it {colour} in the {room}",
        "I'm leaving the {room}, lights out",
        "Let there be light in the {room}",
        "Can we have {colour} lights in the {room}?",
        "Let's go {colour} in the {room}",
        "Get the {room} lights down to {brightness}",
        "Find a {colour} tone for the {room} lamp",
        "Start the {room} lights at {brightness}",
        "Tell the {room} lights to go {colour}",
        "How about {brightness} in the {room}?",
        "Give the {room} some {colour} light",
        "Will you dim the {room} to {brightness}?",
    ),
    "get_directions": (
        "How do I get to {destination}?",
        "How do I get to {destination} from {origin}?",
        "How do I get from {origin} to {destination} {mode}?",
        "Directions to {destination}",
        "Directions from {origin} to {destination}",
        "Directions to {destination} {mode}",
        "Give me directions to {destination} {mode}",
        "Show me the way to {destination}",
        "Show me the route from {origin} to {destination}",
        "Show me how to go to {destination} {mode}",
        "Navigate to {destination}",
        "Navigate from {origin} to {destination} {mode}",
        "Take me to {destination}",
        "Take me from {origin} to {destination}",
        "Find a route to {destination} {mode}",
        "Find the fastest way to {destination} from {origin}",
        "What's the best way to {destination} {mode}?",
        "What's the quickest route from {origin} to {destination}?",
        "Can you guide me to {destination}?",
        "Could you map a route to {destination} from {origin}?",
        "I need to get to {destination} {mode}",
        "I'm at {origin}, how do I reach {destination}?",
        "I want to go to {destination} {mode}",
        "Which way is {destination} from {origin}?",
        "Would you show me the way to {destination} {mode}?",
        "Tell me the route to {destination}",
        "Please get me to {destination} from {origin}",
        "I'd like the route to {destination}",
        "I'm lost, bring me to {destination}",
        "Let's go to {destination} {mode}",
        "Can we get to {destination} {mode}?",
        "Let me see the way to {destination} from {origin}",
        "Set the route to {destination} from {origin}",
        "Start navigation to {destination}",
        "Get me from {origin} to {destination} {mode}",
        "How far is {destination} from {origin}?",
        "Try a route to {destination} {mode}",
        "I'm leaving {origin} for {destination}, guide me",
        "Will you lead me to {destination}?",
    ),
}

TEST_PHRASINGS: dict[str, tuple[str, ...]] = {
    "get_weather": (
        "Will I need an umbrella in {place} {day}?",
        "Any chance of rain {day} in {place}?",
        "Look up the forecast for {place}",
        "I'm heading to {place} {day}, what will the weather be like?",
        "How warm is it in {place}?",
        "Is {place} getting snow {day}?",
        "Could you tell me the weather {day} for {place}?",
        "Are we expecting sunshine in {place} {day}?",
    ),
    "play_music": (
        "I'm in the mood for something by {artist}",
        "Would you play {song} by {artist}?",
        "Let me hear {song}",
        "Play us {song} by {artist}",
        "Can we listen to {artist}?",
        "Play anything by {artist}",
        "Play the song {song}",
        "Find {song} by {artist} and play it",
    ),
    "book_restaurant": (
        "Could you reserve {restaurant} for {people} {day}?",
        "I want a table at {restaurant} {day} at {time}",
        "Please book dinner for {people} at {restaurant} at {time}",
        "Try to get a table for {people} at {restaurant} {day}",
        "We'd like to eat at {restaurant} {day}, table for {people}",
        "Can {restaurant} seat {people} {day} at {time}?",
        "Reservation at {restaurant}, {people}, {day} at {time}",
    ),
    "set_timer": (
        "Please start a countdown of {duration}",
        "Set {duration} for the {label}",
        "I'd like a {label} timer of {duration}",
        "Let me know when {duration} are up",
        "Can you count down {duration} for me?",
        "Timer, {duration}",
        "Run a timer for {duration} for the {label}",
    ),
    "send_message": (
        "Would you let {contact} know that {message}?",
        "Shoot {contact} a text saying {message}",
        "Please text {contact} to say {message}",
        "Send word to {contact} that {message}",
        "I need to message {contact}: {message}",
        "Ping {contact} and say {message}",
        "Can you send {contact} a message that {message}?",
    ),
    "add_reminder": (
        "Please remind me {day} that I need to {task}",
        "Would you remind me to {task} {day} at {time}?",
        "I want to be reminded to {task} at {time}",
        "Help me remember to {task} {day}",
        "Make a reminder to {task} {day} at {time}",
        "Set up a reminder: {task} {day}",
        "At {time}, remind me to {task}",
    ),
    "set_lights": (
        "Please switch the lights in the {room} to {colour}",
        "Put the {room} lights at {brightness}",
        "I'd like the {room} lights {colour}",
        "Would you turn off the {room} lights?",
        "Set the {room} lamp to {brightness}",
        "Can you dim the light in the {room} to {brightness}?",
        "Light up the {room} in {colour}",
    ),
    "get_directions": (
        "Tell me how to get to {destination}",
        "What's the way from {origin} to {destination}?",
        "Can you give me directions to {destination} {mode}?",
        "Please navigate me to {destination}",
        "I have to reach {destination} {mode}, which route is best?",
        "Plan a route from {origin} to {destination}",
        "How can I go to {destination} {mode} from {origin}?",
    ),
}


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in " ".join(text.split()).split(";") if part.strip())


TRAIN_VALUES: dict[str, tuple[str, ...]] = {
    "place": _listed(
        """Lisbon; Vienna; Oslo; Chicago; Nairobi; Kyoto; Buenos Aires; Cape Town; Reykjavik; New Orleans; Toronto;
        Singapore; Marseille; Krakow; Denver; San Diego; Istanbul; Hanoi; Glasgow; Salt Lake City; Dublin; Athens;
        Bogotá; Melbourne; Tunis; Ljubljana; Boston; Rio de Janeiro; Helsinki; Zürich; Mumbai; Seattle; Cairo;
        Palermo; Bergen; St. Louis; Quito; Tbilisi; the Black Forest; Lake Tahoe; Yosemite; the Scottish Highlands;
        Bali; Santa Fe; Antwerp; Belgrade; Osaka; Accra; Montreal; Hamburg"""
    ),
    "day": _listed(
        """today; tonight; tomorrow; tomorrow morning; tomorrow evening; this afternoon; this weekend; this Friday;
        next week; next weekend; next Monday; next Thursday; Monday; Tuesday; Thursday; Saturday; Monday morning;
        Tuesday afternoon; Friday night; Saturday evening; on Wednesday; on Sunday; on Saturday night; on May 3rd; on
        the first of June; on Christmas Day"""
    ),
    "song": _listed(
        """Paper Lanterns; Midnight Ferry; The Long Way Down; Glass Mountain; Carry Me North; Seven Red Doors; Honey
        and Rust; Second Hand Sunlight; Ghost of the Harbour; Slow Machine; Tangerine Sky; All My Quiet Friends; Blue
        Bicycle; Wolves at Breakfast; Letters to Marianne; Velvet Static; Rain on the Radio; Copper Heart; No More
        Mondays; Dancing in the Hallway; The Last Payphone; Summer of Moths; Kerosene; Wild Geese; Under the Overpass;
        Silver Tongue; Better Weather; Hollow Bones; Neon Garden; Say It Twice; Borrowed Time; Cinnamon Girl Blues;
        Ten Thousand Steps; Home by Eleven; Lighthouse Keeper; Fever Dream Motel"""
    ),
    "artist": _listed(
        """The Velvet Anchors; Mara Quill; Johnny Driftwood; Los Pájaros; Ada Winterbourne; The Paper Kings; DJ
        Marzipan; Northern Static; Elena Rossi Trio; Kofi and the Suns; The Low Tides; Billie Harrow; Cassette Youth;
        Saint Juniper; Otto Blum; Red Kettle; The Moonlit Few; Priya Nair; Tin Whistle Society; Gus Hanley; The Broken
        Compasses; Lila Moreau; Black Pine; Oscar and the Owls; Thunder Lake; The Night Porters; Yuki Tanabe; Fern
        Hollow; Big Sal Dorsey; Queen Marigold"""
    ),
    "restaurant": _listed(
        """Trattoria Bella; The Golden Fork; Sakura House; Chez Margot; El Toro Negro; The Rusty Anchor; Blue Lotus;
        Mama Lucia; The Copper Pot; Bistro Noir; Taste of Punjab; Olive and Thyme; La Cantina; The Hungry Fox; Dragon
        Palace; Casa Verde; The Old Mill; Pepe's Pizza; Nonna's Kitchen; Harbour Grill; Le Petit Jardin; Spice Route;
        The Corner Table; Zorba's; Burger Barn; The White Horse; Ocean Pearl; Saigon Street; Green Leaf; Café
        Amelie"""
    ),
    "people": _listed(
        """two; three; four; five; six; ten; 2; 4; 5; 6; 9; 12; two people; three people; four people; six people;
        eight people; 4 adults; two adults and a child; five guests; a group of eight; a party of six"""
    ),
    "time": _listed(
        """7 pm; 8 pm; 6 am; 9 am; 10:30 am; 5:15 pm; 7:30; 8:30 pm; 12:45; noon; midnight; six o'clock; nine o'clock;
        half past seven; half past twelve; a quarter past five; a quarter to eight; 6:30 in the evening; 8 in the
        morning; 18:00; 20:15; 11 pm; 3 pm; 4:20; two in the afternoon"""
    ),
    "duration": _listed(
        """5 minutes; 10 minutes; 15 minutes; 20 minutes; 30 minutes; 45 minutes; 3 minutes; 8 minutes; 12 minutes; 25
        minutes; 90 minutes; one hour; two hours; 2 hours; 1 hour; three minutes; five minutes; ten minutes; twenty
        minutes; half an hour; an hour and a half; 30 seconds; 45 seconds; ninety seconds; 1 minute 30 seconds; 2
        hours 15 minutes; 4 and a half minutes; sixty minutes; six minutes; 50 minutes"""
    ),
    "label": _listed(
        """pasta; rice; tea; pizza; cake; laundry; workout; nap; homework; chicken; bread; meditation; break; plank;
        coffee; roast; dishwasher; soup; yoga; sauce; stew; casserole; turkey; dough; barbecue; bath; chess game;
        piano lesson"""
    ),
    "contact": _listed(
        """Maria; my mom; Tom; Aunt Rose; Dr. Patel; my sister; Jonas; Aisha; Grandma; Mr. Lindqvist; Carlos; Chloe;
        my boss; the plumber; Uncle Pete; Ben; Yara; Sofia; my roommate; Hannah; Kenji; Liam; Olu; Mrs. Dawson; Nadia;
        the babysitter; Felix; Ivan; Coach Miller; Emily; my landlord; Priya; Lucas; Zoe; Mateo; Ingrid; Anna Weber;
        David Okafor"""
    ),
    "message": _listed(
        """I'm running late; I'll be there in ten minutes; the meeting is cancelled; dinner is ready; I got the
        tickets; we are out of milk; the train is delayed; I can't make it tonight; the keys are under the mat; happy
        birthday; I'll call back later; the kids are asleep; my phone is almost dead; the package arrived; I left my
        wallet at home; practice starts at four; we won the game; traffic is terrible; I found your jacket; the car is
        fixed; I'm stuck at work; please buy some bread; the door code has changed; I said yes; we need to talk; the
        flight landed early; good luck with the exam; the cat is fine; I'm bringing dessert; lunch is on me; see you
        at the station; the doctor had good news; the wifi is down again; nobody is home; I'm on my way; thanks for
        the flowers; I'll pick up the kids; the show starts at nine"""
    ),
    "task": _listed(
        """call the dentist; water the plants; buy milk; pay the rent; take out the trash; feed the cat; pick up the
        dry cleaning; renew my passport; send the invoice; book the flights; return the library books; charge the
        camera; walk the dog; take my medicine; email the landlord; defrost the chicken; change the sheets; order a
        birthday cake; check the mail; clean the oven; fix the bike; submit the report; cancel the subscription;
        vacuum the car; buy stamps; wish Leo a happy birthday; lock the back door; print the tickets; back up my
        laptop; iron the shirts; thank Grandpa; turn in the homework; pack the suitcase; stretch; get a haircut; sign
        the contract"""
    ),
    "room": _listed(
        """kitchen; living room; bedroom; bathroom; hallway; garage; office; dining room; basement; kids' room;
        garden; attic; guest room; balcony; nursery; laundry room; porch; closet"""
    ),
    "colour": _listed(
        """red; blue; green; warm white; purple; orange; yellow; soft pink; cool white; deep blue; turquoise; gold;
        lime green; dark red; sky blue; magenta"""
    ),
    "brightness": _listed(
        """10 percent; 20 percent; 30 percent; 40 percent; 50 percent; 75 percent; 90 percent; 100 percent; 15%; 25%;
        60%; 80%; 5%; half; full brightness; maximum; fifty percent; twenty percent; seventy percent; medium"""
    ),
    "destination": _listed(
        """the airport; the train station; Central Park; the nearest pharmacy; the city library; 14 Maple Street; the
        Museum of Modern Art; Riverside Mall; the university hospital; Harbor Bridge; the closest gas station; Oak
        Hill Cemetery; 220 King's Road; the stadium; St. Mary's Church; the post office; Lakeview Campground; the old
        town; Terminal 2; the dentist on Elm Street; Greenfield Elementary School; the nearest bakery; the opera
        house; Fisher's Wharf; the botanical garden; Hotel Miramar; the courthouse; Sunset Beach; the IKEA; 9 Station
        Lane"""
    ),
    "origin": _listed(
        """home; work; my office; the hotel; City Hall; Union Square; the north gate; Baker Street; the ferry
        terminal; my parents' house; the conference centre; Pier 39; the bus stop; 5 Rose Avenue; the parking garage;
        Market Square; my school; the campus; Westfield; the subway station"""
    ),
    "mode": _listed(
        """by car; on foot; by bike; by bus; by subway; by motorbike; by public transport; by taxi; by boat"""
    ),
}

TEST_VALUES: dict[str, tuple[str, ...]] = {
    "place": _listed(
        """Porto; Stockholm; Nashville; Lagos; Sapporo; Mexico City; Tallinn; Edinburgh; Santiago; Phoenix; Jakarta;
        Lyon; Bristol; Vilnius; the Grand Canyon; San Antonio; Düsseldorf; Marrakesh; Auckland; Prague"""
    ),
    "day": _listed(
        """this evening; this morning; tomorrow night; tomorrow afternoon; Wednesday; Friday; Sunday; this Saturday;
        next Tuesday; next Friday; Sunday morning; Thursday night; on Tuesday; on Friday evening; on July 12th"""
    ),
    "song": _listed(
        """Broken Umbrella; River of Salt; Electric Orchard; The Last Good Morning; Marble Staircase; Chasing
        Satellites; Peppermint Road; Goodnight Cleveland; Sleeping Giants; Two Left Shoes; Amber Waves Goodbye; Frozen
        Carousel; Hurricane Letter; My Favourite Window"""
    ),
    "artist": _listed(
        """The Silver Herons; Nora Castellan; Desmond Flint; Little Cartographers; Amara Diallo; The Sunday Drivers;
        Hugo Brandt; Violet Engine; The Dusty Strings; Rosa Delgado; Captain Nimbus; Wren Holloway"""
    ),
    "restaurant": _listed(
        """Villa Rosetta; The Silver Spoon; Tokyo Garden; Maison Claire; The Laughing Goat; Red Pepper; Papa
        Giorgio's; The Brass Lantern; Curry Corner; Lemon and Sage; Noodle Bar; The Fisherman's Rest; Taverna Mykonos;
        Bombay Nights"""
    ),
    "people": _listed(
        """seven; eight; nine; 3; 7; 8; 10; five people; seven people; ten people; three adults; six guests; a group
        of nine; a party of four"""
    ),
    "time": _listed(
        """6 pm; 9 pm; 7 am; 11:30 am; 6:45 pm; 8:15; 13:00; 19:30; seven o'clock; ten o'clock; half past eight; a
        quarter to six; 5 in the morning; 10 pm; three in the afternoon"""
    ),
    "duration": _listed(
        """4 minutes; 7 minutes; 18 minutes; 35 minutes; 40 minutes; 55 minutes; three hours; 4 hours; seven minutes;
        fifteen minutes; forty seconds; 20 seconds; 2 minutes 30 seconds; two and a half hours; 75 minutes"""
    ),
    "label": _listed(
        """lasagna; washing machine; quiz; steak; green tea; brisket; meeting; violin practice; curry; sourdough"""
    ),
    "contact": _listed(
        """Oliver; my dad; Fatima; Aunt Clara; Dr. Nguyen; my brother; Sven; Beatrice; Grandpa; Mrs. Kowalski; Diego;
        my neighbour; Rachel; the electrician; Marcus Bell; Leila; my wife; Theo"""
    ),
    "message": _listed(
        """I missed the bus; the party starts at eight; I'm already at the airport; the soup is in the fridge; we are
        almost there; I'll be home by six; the dog needs a walk; the concert was amazing; I forgot my umbrella; the
        printer is broken; I'm thinking of you; the baby is finally sleeping; your book is on the table; we moved the
        meeting to Monday; the bill is paid; I'm waiting outside; there is no hot water; congratulations on the new
        job"""
    ),
    "task": _listed(
        """call the bank; water the tomatoes; buy coffee; pay the electricity bill; feed the fish; pick up the kids;
        renew my library card; mail the letter; book a hotel; bring the umbrella; wash the car; charge my phone; check
        the tire pressure; order new glasses; clean the fridge; text the babysitter; prepare the slides; visit
        Grandma"""
    ),
    "room": _listed(
        """study; playroom; sunroom; entrance hall; workshop; main bedroom; terrace; pantry; library; home theatre"""
    ),
    "colour": _listed(
        """pink; violet; bright white; light green; teal; candlelight yellow; crimson; navy blue; lavender"""
    ),
    "brightness": _listed(
        """35 percent; 45 percent; 65 percent; 85 percent; 55%; 70%; 12%; 95%; sixty percent; minimum"""
    ),
    "destination": _listed(
        """the bus station; the nearest supermarket; 31 Willow Lane; the aquarium; Hyde Park; the city hospital; Hotel
        Bellevue; the football stadium; Queen's Theatre; the closest bank; the farmers market; Lincoln High School;
        Cedar Point Beach; the science museum; Terminal 5; Mill Creek Trail"""
    ),
    "origin": _listed(
        """the office; my apartment; Victoria Station; the south entrance; the gym; 8 Orchard Road; Trafalgar Square;
        the youth hostel; my friend's house; the car park"""
    ),
    "mode": _listed("""by train; by tram; on my bike; by scooter; by coach; by ferry"""),
}
