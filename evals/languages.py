"""Which language a text is in: its script, then the small words that only some languages have.

Enough for whole answers in one of the languages below; a few words may be taken for another language of their script.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

# The languages of a script, as ISO 639-1; the first where no small word decides. Names begin Unicode's of a letter.
SCRIPTS = {
    "LATIN": ("en", "de", "es", "fi", "fr", "it", "nl", "pl", "pt", "sv", "sw", "tr", "vi"),
    "CYRILLIC": ("ru", "bg", "uk"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "CJK": ("zh",),
    "GREEK": ("el",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "HANGUL": ("ko",),
    "HEBREW": ("he",),
    "HIRAGANA": ("ja",),
    "KANNADA": ("kn",),
    "KATAKANA": ("ja",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
}
LANGUAGES = frozenset(language for languages in SCRIPTS.values() for language in languages)
SMALL_WORDS = {
    "en": "the of and to in is are was were it this that for with as on be by at from have has not you your i we they "
    "my he she his her an or but can will would there their what which who if do does been our all no yes so",
    "de": "der die das und ist nicht ein eine ich zu den dem mit sich auf für sie es von wird wir auch im des als bei",
    "es": "el la los las y que en un una es por con para no se lo como más su pero del al este está son muy",
    "fi": "ja on ei se että oli hän mutta kun niin ovat tai myös sekä voi olla joka kuin minä sinä he tämä ole",
    "fr": "le la les et est des un une du que qui dans pour pas je vous nous il elle avec sur au ce ne sont mais",
    "it": "il lo la gli e è di che un una per non con sono del della si più ma come anche nel questo ho i",
    "nl": "de het een en van is niet dat op te voor met zijn aan er ik ook maar om hij wij je",
    "pl": "i w nie na się jest to że z do jak ale o po co przez są dla od może tak",
    "pt": "o os as e que um uma é não para com do da em no na por mais se como mas dos das seu você são ao",
    "sv": "och att det är en ett som för på av inte med den till jag har de om vi kan var från",
    "sw": "na ya wa kwa ni za katika la kama hii cha yako wako kuwa si au lakini hiyo pia wetu yetu sana hilo mimi",
    "tr": "ve bir bu da de için ile çok olarak daha ne gibi ama var değil ben sen o mi en kadar",
    "vi": "và của là có không được cho một trong với những các này người để tôi bạn đã sẽ khi từ như nhiều",
    "ru": "и что как это вы мы для его но или был они из так у же только я она я был было при мне",
    "bg": "да се е са за че ще това си като от и по най ми или който съм бъде може много но",
    "uk": "і що як це та є або але для від його у ви ми які бути може й він вона ще",
    "ar": "في من على إلى أن هذا هذه التي الذي لا ما عن مع كان هو هي أو كل قد لم يمكن و",
    "fa": "است را که این از به با می برای در و های هستند شما آن یک ما بود خود تا یا هم",
    "ur": "ہے ہیں کے کی کا میں اور سے کو نے یہ پر ایک نہیں آپ تھا بھی جو ہم اس لیے کر",
    "hi": "है हैं के का की में और से को यह नहीं पर एक ने भी कि था लिए आप हम मैं तो जो कर या",
    "mr": "आहे आणि आहेत मध्ये नाही हे या ते साठी होते तुम्ही आपल्या असे मी आम्ही एक ही त्या तर हा करा आपण",
    "ne": "छ छन् र मा हो यो लाई गर्न पनि भएको हुन्छ छैन तपाईं हामी लागि म त्यो हुनुहुन्छ गर्नुहोस् एक थियो तर",
}
WORDS_OF = {language: frozenset(words.split()) for language, words in SMALL_WORDS.items()}
PUNCTUATION = re.compile(r"[^\w\s\u0300-\u036f\u0900-\u0dff]|_|[\u0964\u0965]")  # not the vowel signs of India


def language_of(text: str) -> str | None:
    """The language of most letters, as ISO 639-1; "und" for a script not in SCRIPTS; None for text without letters."""
    scripts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in text if letter.isalpha())
    if not scripts:
        return None
    languages = SCRIPTS.get(scripts.most_common(1)[0][0], ("und",))
    if len(languages) == 1:
        return languages[0]
    words = PUNCTUATION.sub(" ", unicodedata.normalize("NFC", text).casefold()).split()
    return max(languages, key=lambda language: sum(word in WORDS_OF[language] for word in words))
